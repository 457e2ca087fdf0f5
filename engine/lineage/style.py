"""The looks and the behaviour of the lineage page: CSS and JavaScript, both inline.

All rules are below `.lineage`, so that the page can stand in a Flyte Deck beside others.
"""

from __future__ import annotations

CSS = """
.lineage{--bg:#f6f7f9;--panel:#fff;--text:#1b2230;--soft:#5b6472;--line:#d9dee6;--edge:#98a2b1;
--accent:#2458d3;--bad:#b42318;--badbg:#fdecea;--good:#16703c;--goodbg:#e7f6ec;--code:#f0f2f6;
--source:#6b7280;--dataset:#0f7d83;--sft:#2d6cdf;--rl:#c2570c;--preference:#8a5a00;
--reward_model:#7a3fc4;--evaluation:#26803d;--promotion:#b8327a;--checkpoint:#8a6d00;
--model_version:#a3202f;--other:#4b5563;
color-scheme:light dark;background:var(--bg);color:var(--text);margin:0;padding:24px;
font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
@media (prefers-color-scheme:dark){.lineage{--bg:#12161d;--panel:#1a202a;--text:#e6eaf1;
--soft:#9aa5b5;--line:#303947;--edge:#667285;--accent:#7ea6ff;--bad:#ff8f85;--badbg:#3a1c1a;
--good:#6fd694;--goodbg:#15301f;--code:#232b37;--source:#9ca3af;--dataset:#3cc0c6;--sft:#79a6ff;
--rl:#ff9d5c;--preference:#e0ad4a;--reward_model:#b896f5;--evaluation:#6ccb84;--promotion:#f08bbd;
--checkpoint:#dcc04d;--model_version:#ff8592;--other:#a3adba}}
body:has(>.lineage){margin:0;background:#f6f7f9}
@media (prefers-color-scheme:dark){body:has(>.lineage){background:#12161d}}
.lineage *{box-sizing:border-box}
.lineage h1{font-size:22px;line-height:1.25;margin:0 0 4px}
.lineage h2{font-size:16px;margin:28px 0 10px}
.lineage h3{font-size:13px;margin:16px 0 6px;color:var(--soft);font-weight:600}
.lineage p{margin:4px 0}
.lineage .soft{color:var(--soft)}
.lineage code,.lineage .mono{font:12px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;
overflow-wrap:anywhere}
.lineage .banner{border:1px solid var(--line);border-left-width:5px;border-radius:8px;
padding:10px 14px;margin:14px 0;background:var(--panel)}
.lineage .banner.bad{border-color:var(--bad);background:var(--badbg)}
.lineage .banner.good{border-color:var(--good);background:var(--goodbg)}
.lineage .banner ul{margin:6px 0 0;padding-left:20px}
.lineage .banner li{overflow-wrap:anywhere}
.lineage .main{margin-top:14px}
.lineage .panel{background:var(--panel);border:1px solid var(--line);border-radius:10px;min-width:0}
.lineage .tools{display:flex;flex-wrap:wrap;gap:8px;align-items:center;padding:10px 12px;
border-bottom:1px solid var(--line)}
.lineage .tools input{flex:1 1 160px;min-width:0;max-width:280px}
.lineage input,.lineage button{font:inherit;color:inherit;background:var(--bg);
border:1px solid var(--line);border-radius:6px;padding:4px 10px}
.lineage button{cursor:pointer}
.lineage button:hover{border-color:var(--accent)}
.lineage :focus-visible{outline:2px solid var(--accent);outline-offset:2px}
.lineage .legend{display:flex;flex-wrap:wrap;gap:4px 14px;padding:8px 12px;margin:0;list-style:none;
border-top:1px solid var(--line);color:var(--soft);font-size:12px}
.lineage .dot{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:5px;
background:var(--k)}
.lineage .canvas{overflow:auto;max-height:54vh;min-height:96px;padding:4px}
.lineage svg.graph{display:block;margin:0 auto}
.lineage .k-source{--k:var(--source)}.lineage .k-dataset{--k:var(--dataset)}
.lineage .k-sft{--k:var(--sft)}.lineage .k-rl{--k:var(--rl)}
.lineage .k-preference{--k:var(--preference)}.lineage .k-reward_model{--k:var(--reward_model)}
.lineage .k-evaluation{--k:var(--evaluation)}.lineage .k-promotion{--k:var(--promotion)}
.lineage .k-checkpoint{--k:var(--checkpoint)}.lineage .k-model_version{--k:var(--model_version)}
.lineage .k-other{--k:var(--other)}
.lineage .node{cursor:pointer;text-decoration:none;outline:none}
.lineage .node .box{fill:var(--panel);stroke:var(--line);stroke-width:1.5}
.lineage .node .stripe{fill:var(--k)}
.lineage .node .name{fill:var(--text);font-size:13px;font-weight:600}
.lineage .node .under{fill:var(--soft);font-size:11px;
font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.lineage .node .badge{fill:var(--bad);font-size:11px;font-weight:700}
.lineage .node:hover .box{stroke:var(--k)}
.lineage .node.focus .box{stroke:var(--k);stroke-width:2.5}
.lineage .node.fault .box,.lineage .node.missing .box{stroke:var(--bad);stroke-width:2}
.lineage .node.missing .box{stroke-dasharray:6 4}
.lineage .node.chosen .box{stroke:var(--accent);stroke-width:3}
.lineage .node:focus-visible .box{stroke:var(--accent);stroke-width:3;
filter:drop-shadow(0 0 3px var(--accent))}
.lineage .node.dim{opacity:.25}
.lineage .edge{fill:none;stroke:var(--edge);stroke-width:1.5;stroke-opacity:.75}
.lineage .edge.near{stroke:var(--accent);stroke-width:2.5;stroke-opacity:1}
.lineage .tip{fill:var(--edge)}
.lineage .details{padding:14px 16px;margin-top:14px}
.lineage .columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));
gap:4px 32px;align-items:start}
.lineage .columns>div{min-width:0}
.lineage .columns>div>h3:first-child{margin-top:4px}
.lineage .detail h2{margin:0 0 2px;overflow-wrap:anywhere}
.lineage.live .detail[hidden]{display:none}
.lineage .detail+.detail{border-top:1px solid var(--line);margin-top:18px;padding-top:14px}
.lineage.live .detail+.detail{border:0;margin:0;padding:0}
.lineage .scroll{overflow-x:auto}
.lineage table{border-collapse:collapse;width:100%;font-size:13px}
.lineage th{text-align:left;color:var(--soft);font-weight:600;white-space:nowrap}
.lineage th,.lineage td{padding:4px 10px 4px 0;border-bottom:1px solid var(--line);
vertical-align:top;overflow-wrap:anywhere}
.lineage tr:last-child td{border-bottom:0}
.lineage table.pairs td:first-child{color:var(--soft);white-space:nowrap;width:1%}
.lineage table.long td:first-child{white-space:normal;width:50%}
.lineage .card{padding:12px 16px;margin-bottom:12px}
.lineage .card>h3:first-child{margin-top:0}
.lineage .was{color:var(--bad)}.lineage .is{color:var(--good)}
.lineage .num{font-variant-numeric:tabular-nums;white-space:nowrap}
.lineage a{color:var(--accent)}
.lineage details>summary{cursor:pointer;color:var(--soft);font-weight:600;font-size:13px;
margin-top:14px}
.lineage .faults{color:var(--bad);margin:8px 0;padding-left:18px}
.lineage .faults li{overflow-wrap:anywhere}
.lineage tr[hidden]{display:none}
@media print{.lineage .canvas{max-height:none;overflow:visible}
.lineage .tools{display:none}}
"""

SCRIPT = """
(function(){
"use strict";
var root=document.currentScript.closest(".lineage")||document.querySelector(".lineage");
var find=function(q){return Array.prototype.slice.call(root.querySelectorAll(q));};
var nodes=find("svg .node"),edges=find("svg .edge"),details=find(".detail");
var rows=find("tr[data-node]"),canvas=root.querySelector(".canvas");
var svg=root.querySelector("svg.graph"),filter=root.querySelector(".filter");
if(!svg){return;}
var full={width:+svg.getAttribute("width"),height:+svg.getAttribute("height")},scale=1;
var byId={};nodes.forEach(function(n){byId[n.dataset.node]=n;});
root.classList.add("live");
function zoom(to){
  var old=scale;scale=Math.max(0.1,Math.min(2,to));
  var x=(canvas.scrollLeft+canvas.clientWidth/2)/old,y=(canvas.scrollTop+canvas.clientHeight/2)/old;
  svg.setAttribute("width",full.width*scale);svg.setAttribute("height",full.height*scale);
  canvas.scrollLeft=x*scale-canvas.clientWidth/2;canvas.scrollTop=y*scale-canvas.clientHeight/2;
}
function fit(){
  var room=canvas.clientWidth-12,high=canvas.clientHeight-12;
  zoom(Math.min(1,room/full.width,Math.max(high,320)/full.height));
}
function show(node){
  var box=node.getBoundingClientRect(),frame=canvas.getBoundingClientRect();
  if(box.left<frame.left||box.right>frame.right){
    canvas.scrollLeft+=box.left+box.width/2-frame.left-frame.width/2;}
  if(box.top<frame.top||box.bottom>frame.bottom){
    canvas.scrollTop+=box.top+box.height/2-frame.top-frame.height/2;}
}
function choose(id){
  if(!byId[id]){return;}
  nodes.forEach(function(n){
    var on=n.dataset.node===id;n.classList.toggle("chosen",on);
    if(on){n.setAttribute("aria-current","true");}else{n.removeAttribute("aria-current");}
  });
  edges.forEach(function(e){
    e.classList.toggle("near",e.dataset.parent===id||e.dataset.child===id);});
  details.forEach(function(d){d.hidden=d.id!==id;});
  show(byId[id]);
}
function around(id,key){
  var at=byId[id].getBoundingClientRect(),best=null,least=Infinity;
  var across=key==="ArrowLeft"||key==="ArrowRight";
  var linked={};
  edges.forEach(function(e){
    if(key==="ArrowLeft"&&e.dataset.child===id){linked[e.dataset.parent]=1;}
    if(key==="ArrowRight"&&e.dataset.parent===id){linked[e.dataset.child]=1;}});
  nodes.forEach(function(n){
    if(n.dataset.node===id||across&&!linked[n.dataset.node]){return;}
    var b=n.getBoundingClientRect(),dx=b.left-at.left,dy=b.top-at.top;
    if(key==="ArrowUp"&&dy>=0||key==="ArrowDown"&&dy<=0){return;}
    if(!across&&Math.abs(dx)>1){return;}
    var far=Math.abs(dx)+Math.abs(dy);
    if(far<least){least=far;best=n;}
  });
  return best;
}
root.addEventListener("click",function(event){
  var link=event.target.closest("a[data-node]"),row=event.target.closest("tr[data-node]");
  var hit=link||row;
  if(!hit||!root.contains(hit)){return;}
  if(event.ctrlKey||event.metaKey){return;}
  event.preventDefault();choose(hit.dataset.node);
  if(!hit.closest("svg")&&byId[hit.dataset.node]){byId[hit.dataset.node].focus();}
});
svg.addEventListener("keydown",function(event){
  var node=event.target.closest(".node");
  if(!node){return;}
  if(event.key===" "||event.key==="Enter"){event.preventDefault();choose(node.dataset.node);}
  else if(event.key.indexOf("Arrow")===0){
    event.preventDefault();
    var next=around(node.dataset.node,event.key);
    if(next){next.focus();choose(next.dataset.node);}
  }
});
if(filter){filter.addEventListener("input",function(){
  var words=filter.value.toLowerCase().split(/\\s+/).filter(Boolean),first=null;
  rows.forEach(function(row){
    var text=row.dataset.words;
    var on=words.every(function(w){return text.indexOf(w)>=0;});
    row.hidden=!on;
    var node=byId[row.dataset.node];
    if(node){node.classList.toggle("dim",!on);if(on&&words.length&&!first){first=node;}}
  });
  if(first){show(first);}
});}
find("button[data-zoom]").forEach(function(b){b.addEventListener("click",function(){
  if(b.dataset.zoom==="fit"){fit();}else{zoom(scale*(b.dataset.zoom==="in"?1.25:0.8));}});});
var start=location.hash.slice(1);
if(!byId[start]){start=(root.querySelector("svg .node.focus")||nodes[0]).dataset.node;}
choose(start);
// In a Deck the page is laid out when its tab is opened; sizes are known from then on.
var seen=new ResizeObserver(function(){
  if(!canvas.clientWidth){return;}
  seen.disconnect();
  if(full.width>canvas.clientWidth){
    zoom(Math.max(0.6,Math.min(1,(canvas.clientWidth-12)/full.width)));}
  show(root.querySelector(".node.chosen"));
});
seen.observe(canvas);
}());
"""
