"""The report's style sheet. Every rule is scoped to `.evaluation`, so that a Flyte Deck, which
puts the page inside its own, keeps its look."""

CSS = """
.evaluation { max-width: 1120px; margin: 0 auto; padding: 40px 32px 64px; background: #fff;
  color: #1d2433; font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans",
  "DejaVu Sans", sans-serif; text-align: left; box-sizing: border-box; }
.evaluation *, .evaluation *::before { box-sizing: inherit; }
.evaluation h1 { font-size: 27px; line-height: 1.25; font-weight: 650; margin: 0 0 6px;
  letter-spacing: -0.01em; }
.evaluation h2 { font-size: 18px; font-weight: 650; margin: 44px 0 12px; }
.evaluation h3 { font-size: 14px; font-weight: 600; margin: 0 0 8px; color: #3b4352; }
.evaluation p { margin: 0 0 12px; max-width: 78ch; }
.evaluation .note { color: #5f6878; font-size: 13.5px; }
.evaluation .scroll + .note { margin-top: 14px; }
.evaluation .facts { display: grid; gap: 14px 28px; margin: 26px 0 0; padding: 16px 18px;
  grid-template-columns: repeat(auto-fill, minmax(285px, 1fr)); background: #f7f8fa;
  border-radius: 10px; }
.evaluation .facts div { min-width: 0; }
.evaluation .facts dt { color: #5f6878; font-size: 12px; }
.evaluation .facts dd { margin: 0; font-size: 13.5px; overflow-wrap: anywhere; }
.evaluation .cards { display: grid; grid-template-columns: repeat(3, 1fr); gap: 16px;
  margin: 26px 0 0; }
.evaluation .card { border: 1px solid #e6e9ef; border-radius: 10px; padding: 16px 18px; }
.evaluation .card.gain { background: #f4f7fe; border-color: #cfdcf8; }
.evaluation .card span { display: block; color: #5f6878; font-size: 13px; }
.evaluation .card b { display: block; font-size: 32px; line-height: 1.25; font-weight: 650;
  letter-spacing: -0.02em; font-variant-numeric: tabular-nums; }
.evaluation .card b small { font-size: 16px; font-weight: 500; color: #5f6878;
  letter-spacing: 0; }
.evaluation .scroll { overflow-x: auto; }
.evaluation table { border-collapse: collapse; width: 100%; font-size: 14px; }
.evaluation th { text-align: left; font-weight: 600; font-size: 12.5px; color: #5f6878;
  padding: 8px 12px; border-bottom: 1px solid #c3c9d4; white-space: nowrap; }
.evaluation td { padding: 9px 12px; border-bottom: 1px solid #e6e9ef; vertical-align: top; }
.evaluation .metrics td, .evaluation .metrics th { font-variant-numeric: tabular-nums; }
.evaluation .metrics .number { text-align: right; white-space: nowrap; }
.evaluation .metrics td small { color: #5f6878; font-size: 12.5px; margin-left: 6px; }
.evaluation .plots { display: grid; grid-template-columns: 1fr 1fr; gap: 28px; }
.evaluation figure { margin: 0; min-width: 0; }
.evaluation svg { display: block; width: 100%; height: auto; }
.evaluation .examples { table-layout: fixed; min-width: 760px; }
.evaluation .examples col.text { width: 29%; }
.evaluation .examples pre { margin: 0 0 6px; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  max-height: 190px; overflow-y: auto; unicode-bidi: isolate; }
.evaluation .group td { background: #f7f8fa; font-weight: 600; font-size: 13px; color: #3b4352; }
.evaluation .right, .evaluation .wrong { display: inline-block; border-radius: 9px;
  padding: 0 8px; font-size: 12px; line-height: 19px; font-weight: 600;
  overflow-wrap: anywhere; max-width: 100%; }
.evaluation .right { background: #e2f4ea; color: #176b42; }
.evaluation .wrong { background: #fce8e6; color: #a02c22; }
@media (max-width: 760px) {
  .evaluation { padding: 24px 16px 40px; }
  .evaluation .cards, .evaluation .plots { grid-template-columns: 1fr; }
}
"""
