// Tooltips and the run switches. The page is complete without this script; values are read back from the drawn paths.
"use strict";
const UNITS = 10000;

function format(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  for (const [least, scale, unit] of [[1e12, 1e12, " T"], [1e9, 1e9, " B"], [1e6, 1e6, " M"], [1e4, 1e3, " k"]])
    if (size >= least * 0.9995) return Number((value / scale).toPrecision(4)) + unit;
  return size < 1e-4 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

// [[x, y], ...] of a path made of absolute points.
function points(path) {
  if (!path.points) path.points = [...path.getAttribute("d").matchAll(/(\d+) (\d+)/g)].map(m => [+m[1], +m[2]]);
  return path.points;
}

function nearest(list, x) {
  let low = 0, high = list.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle][0] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - list[low - 1][0] < list[low][0] - x ? list[low - 1] : list[low];
}

function element(parent, tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  parent.append(made);
  return made;
}

// A cursor and a box inside a plot; show(share) puts them at a share of its width and returns the empty box.
function pointer(plot) {
  const cursor = element(plot, "div", "cursor"), tip = element(plot, "div", "tip");
  const hide = () => { cursor.hidden = tip.hidden = true; };
  hide();
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  return share => {
    cursor.hidden = tip.hidden = false;
    cursor.style.left = `${100 * share}%`;
    tip.style.left = share < 0.5 ? `calc(${100 * share}% + 10px)` : "auto";
    tip.style.right = share < 0.5 ? "auto" : `calc(${100 * (1 - share)}% + 10px)`;
    tip.replaceChildren();
    return tip;
  };
}

function follow(plot, onShare) {
  let share = 1;
  const move = to => { share = Math.min(1, Math.max(0, to)); onShare(share); };
  const moved = event => {
    const box = plot.getBoundingClientRect();
    move((event.clientX - box.left) / box.width);
  };
  plot.addEventListener("pointermove", moved);
  plot.addEventListener("pointerdown", moved);
  plot.addEventListener("keydown", event => {
    const step = {ArrowLeft: -0.01, ArrowRight: 0.01}[event.key];
    if (step) { event.preventDefault(); move(share + step); }
  });
}

for (const plot of document.querySelectorAll(".plot[data-y]")) {
  const [x0, x1] = plot.dataset.x.split(" ").map(Number);
  const [y0, y1, log] = plot.dataset.y.split(" ").map(Number);
  const value = down => {
    const up = 1 - down / UNITS;
    return log ? y0 * (y1 / y0) ** up : y0 + up * (y1 - y0);
  };
  const show = pointer(plot);
  follow(plot, share => {
    const tip = show(share);
    element(tip, "div", "soft", `${format(x0 + share * (x1 - x0))} tokens`);
    for (const path of plot.querySelectorAll("path[data-name]:not(.faint)")) {
      if (getComputedStyle(path).display === "none") continue;
      const [, down] = nearest(points(path), share * UNITS);
      const line = element(tip, "div");
      element(line, "span", `swatch ${path.getAttribute("class")}`);
      line.append(`${path.dataset.name}: ${format(value(down))} ${plot.dataset.unit}`);
    }
  });
}

for (const plot of document.querySelectorAll(".plot[data-cells]")) {
  const cells = Uint8Array.from(atob(plot.dataset.cells), c => c.charCodeAt(0));
  const [layers, experts, columns] = plot.dataset.shape.split(" ").map(Number);
  const steps = plot.dataset.steps.split(" ").map(Number);
  const show = pointer(plot);
  let layer = 0, expert = 0;
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / box.height * (layers * (experts + 1) - 1));
    layer = Math.min(layers - 1, Math.floor(row / (experts + 1)));
    expert = Math.min(experts - 1, row % (experts + 1));
  });
  follow(plot, share => {
    const column = Math.min(columns - 1, Math.floor(share * columns));
    const cell = cells[(layer * experts + expert) * columns + column];
    const ratio = cell <= 128 ? (cell - 1) / 127 : 1 + (cell - 128) / 127 * 2;
    const tip = show(share);
    element(tip, "div", "soft", `layer ${layer}, expert ${expert}`);
    element(tip, "div", "", `steps ${steps[2 * column].toLocaleString("en")} to ${steps[2 * column + 1].toLocaleString("en")}`);
    element(tip, "div", "", cell ? `${cell === 255 ? "3 or more" : ratio.toFixed(2)} × its share` : "not logged");
  });
}

for (const box of document.querySelectorAll(".legend input"))
  box.addEventListener("change", () => document.documentElement.classList.toggle(`hide-${box.value}`, !box.checked));
