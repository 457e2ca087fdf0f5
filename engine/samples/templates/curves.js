(function () {
  "use strict";
  // Curves of a run, and what they share with the rest of the page, which the same element holds.
  const root = document.currentScript.closest(".rollouts");
  const SVG = "http://www.w3.org/2000/svg";
  const FIRST = [
    "reward/mean",
    "validation/reward",
    "response/length_mean",
    "actor/entropy",
    "actor/kl",
    "actor/ppo_kl",
    "actor/grad_norm",
    "response/truncated",
  ];

  // Every text from data goes through here: as a text node, never as markup.
  function make(name, className, text) {
    const element = document.createElement(name);
    if (className) {
      element.className = className;
    }
    if (text !== undefined) {
      element.textContent = text;
    }
    return element;
  }

  function short(value) {
    if (typeof value !== "number") {
      return "–";
    }
    const shown = Math.abs(value) >= 1000 ? Math.round(value) : Number(value.toPrecision(3));
    return String(shown).replace("-", "−");
  }

  // One curve, with dashed lines at the steps `marks` and a ring at the step of the model.
  function picture(name, [steps, values], marks, model) {
    const svg = document.createElementNS(SVG, "svg");
    const points = steps.map((step, i) => [step, values[i]]).filter((p) => p[1] !== null);
    const draw = (tag, attributes, text) => {
      const element = document.createElementNS(SVG, tag);
      Object.entries(attributes).forEach(([a, value]) => element.setAttribute(a, value));
      element.textContent = text || "";
      svg.append(element);
    };
    svg.setAttribute("viewBox", "0 0 180 92");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `${name} by step`);
    if (!points.length) {
      return svg;
    }
    const ys = points.map((p) => p[1]);
    const [low, high] = [Math.min(...ys), Math.max(...ys)];
    const [first, last] = [points[0][0], points[points.length - 1][0]];
    const x = (step) => (last > first ? 4 + (172 * (step - first)) / (last - first) : 90);
    const y = (value) => (high > low ? 71 - (52 * (value - low)) / (high - low) : 45);
    draw("line", { class: "grid", x1: 0, x2: 180, y1: 75, y2: 75 });
    marks
      .filter((step) => step >= first && step <= last)
      .forEach((step) => draw("line", { class: "mark", x1: x(step), x2: x(step), y1: 16, y2: 75 }));
    const path = points.map((p) => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ");
    draw("polyline", { class: "line", points: path });
    draw("circle", { class: "dot", cx: x(last), cy: y(ys[ys.length - 1]), r: 2.5 });
    points
      .filter(([step]) => step === model)
      .forEach(([step, value]) => draw("circle", { class: "model", cx: x(step), cy: y(value), r: 4 }));
    draw("text", { x: 2, y: 89 }, `step ${first}`);
    draw("text", { x: 178, y: 89, "text-anchor": "end" }, String(last));
    draw("text", { x: 2, y: 11 }, high > low ? `${short(low)} … ${short(high)}` : short(high));
    return svg;
  }

  function figure(title, name, curve, marks, model) {
    const box = make("figure");
    const caption = make("figcaption");
    caption.append(title, make("b", "", short(curve[1][curve[1].length - 1])));
    box.append(caption, picture(name, curve, marks, model));
    return box;
  }

  // The curves that are looked at first, and one that is chosen from all others.
  function figures(curves, marks, model, chosen, choose) {
    const front = FIRST.filter((name) => curves[name]).slice(0, 5);
    const rest = Object.keys(curves).filter((name) => !front.includes(name));
    const boxes = front.map((name) => {
      const title = make("span");
      name.split(/(?<=[/_.])/).forEach((part) => title.append(part, make("wbr")));
      return figure(title, name, curves[name], marks, model);
    });
    if (rest.length) {
      const shown = rest.includes(chosen) ? chosen : rest[0];
      const select = make("select");
      select.setAttribute("aria-label", "curve");
      rest.forEach((name) => select.append(new Option(name, name, false, name === shown)));
      select.addEventListener("change", () => choose(select.value));
      boxes.push(figure(select, shown, curves[shown], marks, model));
    }
    return boxes;
  }

  root.rollouts = { make, short, figures };
})();
