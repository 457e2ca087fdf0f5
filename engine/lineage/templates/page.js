(function () {
  "use strict";
  const root = document.currentScript.closest(".lineage") || document.querySelector(".lineage");
  const find = (selector) => Array.from(root.querySelectorAll(selector));
  const nodes = find("svg .node");
  const edges = find("svg .edge");
  const details = find(".detail");
  const rows = find("tr[data-node]");
  const canvas = root.querySelector(".canvas");
  const svg = root.querySelector("svg.graph");
  const filter = root.querySelector(".filter");
  if (!svg) {
    return;
  }
  const full = { width: +svg.getAttribute("width"), height: +svg.getAttribute("height") };
  const byId = Object.fromEntries(nodes.map((node) => [node.dataset.node, node]));
  let scale = 1;
  root.classList.add("live");

  // Zooms around the centre of what is visible.
  function zoom(to) {
    const old = scale;
    scale = Math.max(0.1, Math.min(2, to));
    const x = (canvas.scrollLeft + canvas.clientWidth / 2) / old;
    const y = (canvas.scrollTop + canvas.clientHeight / 2) / old;
    svg.setAttribute("width", full.width * scale);
    svg.setAttribute("height", full.height * scale);
    canvas.scrollLeft = x * scale - canvas.clientWidth / 2;
    canvas.scrollTop = y * scale - canvas.clientHeight / 2;
  }

  function fit() {
    const width = canvas.clientWidth - 12;
    const height = Math.max(canvas.clientHeight - 12, 320);
    zoom(Math.min(1, width / full.width, height / full.height));
  }

  // Scrolls the canvas until the node is visible.
  function show(node) {
    const box = node.getBoundingClientRect();
    const frame = canvas.getBoundingClientRect();
    if (box.left < frame.left || box.right > frame.right) {
      canvas.scrollLeft += box.left + box.width / 2 - frame.left - frame.width / 2;
    }
    if (box.top < frame.top || box.bottom > frame.bottom) {
      canvas.scrollTop += box.top + box.height / 2 - frame.top - frame.height / 2;
    }
  }

  function choose(id) {
    if (!byId[id]) {
      return;
    }
    nodes.forEach((node) => {
      const chosen = node.dataset.node === id;
      node.classList.toggle("chosen", chosen);
      if (chosen) {
        node.setAttribute("aria-current", "true");
      } else {
        node.removeAttribute("aria-current");
      }
    });
    edges.forEach((edge) => {
      const near = edge.dataset.parent === id || edge.dataset.child === id;
      edge.classList.toggle("near", near);
    });
    details.forEach((detail) => {
      detail.hidden = detail.id !== id;
    });
    show(byId[id]);
  }

  // The nearest node in an arrow's direction: along edges to the sides, in the same layer up and down.
  function neighbour(id, key) {
    const at = byId[id].getBoundingClientRect();
    const across = key === "ArrowLeft" || key === "ArrowRight";
    const linked = new Set();
    edges.forEach((edge) => {
      if (key === "ArrowLeft" && edge.dataset.child === id) {
        linked.add(edge.dataset.parent);
      }
      if (key === "ArrowRight" && edge.dataset.parent === id) {
        linked.add(edge.dataset.child);
      }
    });
    let best = null;
    let least = Infinity;
    nodes.forEach((node) => {
      if (node.dataset.node === id || (across && !linked.has(node.dataset.node))) {
        return;
      }
      const box = node.getBoundingClientRect();
      const dx = box.left - at.left;
      const dy = box.top - at.top;
      if ((key === "ArrowUp" && dy >= 0) || (key === "ArrowDown" && dy <= 0)) {
        return;
      }
      if (!across && Math.abs(dx) > 1) {
        return;
      }
      const distance = Math.abs(dx) + Math.abs(dy);
      if (distance < least) {
        least = distance;
        best = node;
      }
    });
    return best;
  }

  root.addEventListener("click", (event) => {
    const hit = event.target.closest("a[data-node]") || event.target.closest("tr[data-node]");
    if (!hit || !root.contains(hit) || event.ctrlKey || event.metaKey) {
      return;
    }
    event.preventDefault();
    choose(hit.dataset.node);
    if (!hit.closest("svg") && byId[hit.dataset.node]) {
      byId[hit.dataset.node].focus();
    }
  });

  svg.addEventListener("keydown", (event) => {
    const node = event.target.closest(".node");
    if (!node) {
      return;
    }
    if (event.key === " " || event.key === "Enter") {
      event.preventDefault();
      choose(node.dataset.node);
    } else if (event.key.startsWith("Arrow")) {
      event.preventDefault();
      const next = neighbour(node.dataset.node, event.key);
      if (next) {
        next.focus();
        choose(next.dataset.node);
      }
    }
  });

  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let first = null;
    rows.forEach((row) => {
      const matches = words.every((word) => row.dataset.words.includes(word));
      const node = byId[row.dataset.node];
      row.hidden = !matches;
      if (node) {
        node.classList.toggle("dim", !matches);
        if (matches && words.length && !first) {
          first = node;
        }
      }
    });
    if (first) {
      show(first);
    }
  });

  find("button[data-zoom]").forEach((button) => {
    button.addEventListener("click", () => {
      if (button.dataset.zoom === "fit") {
        fit();
      } else {
        zoom(scale * (button.dataset.zoom === "in" ? 1.25 : 0.8));
      }
    });
  });

  const named = location.hash.slice(1);
  const focused = root.querySelector("svg .node.focus") || nodes[0];
  choose(byId[named] ? named : focused.dataset.node);

  // In a Deck the page is laid out when its tab is opened; sizes are known from then on.
  const seen = new ResizeObserver(() => {
    if (!canvas.clientWidth) {
      return;
    }
    seen.disconnect();
    if (full.width > canvas.clientWidth) {
      zoom(Math.max(0.6, Math.min(1, (canvas.clientWidth - 12) / full.width)));
    }
    show(root.querySelector(".node.chosen"));
  });
  seen.observe(canvas);
})();
