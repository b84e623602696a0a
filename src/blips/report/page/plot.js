"use strict";
// Plots: SVG drawn from data, that mouse, finger and keyboard can ask for the nearest point.
const Plot = (() => {
  const NS = "http://www.w3.org/2000/svg";
  const LEFT = 66, RIGHT = 14, TOP = 12, BOTTOM = 50;

  const make = (name, attributes, parent, text) => {
    const node = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.appendChild(node);
    return node;
  };

  const format = (value) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e5 || size < 1e-3) return value.toExponential(1).replace("e", " e");
    return String(Number(value.toPrecision(4)));
  };

  function range(values, log) {
    const known = values.filter((v) => Number.isFinite(v) && (!log || v > 0));
    if (!known.length) return log ? [0.1, 1] : [0, 1];
    let low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
    if (log) return low === high ? [low / 2, high * 2] : [low / 1.15, high * 1.15];
    const space = (high - low || Math.abs(high) || 1) * 0.05;
    return [low - space, high + space];
  }

  function linearTicks(low, high) {
    const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough);
    const ticks = [];
    for (let k = Math.ceil(low / step); k * step <= high * (1 + 1e-12) + 1e-300; k += 1) ticks.push(k * step);
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    return ticks.map((t) => [t, digits > 5 ? format(t) : (Math.abs(t) < step * 1e-9 ? 0 : t).toFixed(digits)]);
  }

  function logTicks(low, high) {
    const ticks = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += 1)
      for (const f of [1, 2, 5]) {
        const t = f * 10 ** e;
        if (t >= low && t <= high) ticks.push([t, f]);
      }
    const decades = ticks.filter(([, f]) => f === 1);
    const chosen = decades.length >= 3 ? decades : ticks;
    return chosen.length < 3 ? linearTicks(low, high) : chosen.map(([t]) => [t, format(t)]);
  }

  function axisOf(axis, values) {
    const [low, high] = axis.range || range(values, axis.log);
    const map = axis.log ? Math.log10 : (v) => v;
    return {
      low, high,
      ticks: axis.log ? logTicks(low, high) : linearTicks(low, high),
      at: (v) => (map(v) - map(low)) / (map(high) - map(low)),
    };
  }

  // Draws `data` into `figure`; `describe(series, index)` gives the words for a point, `choose` is
  // told of a point that was clicked or entered.
  function draw(figure, data, describe, choose) {
    const svg = figure.querySelector("svg"), readout = figure.querySelector(".readout");
    svg.replaceChildren();
    const WIDTH = Math.min(560, Math.max(300, figure.clientWidth || 460)), HEIGHT = Math.round(WIDTH * 0.74);
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("aria-label", `${data.what}. ${data.note}`);
    readout.textContent = "No point chosen.";
    const all = (key) => data.series.flatMap((s) => s[key]);
    const shared = data.equal ? range(all("x").concat(all("y")), data.x.log) : null;
    const x = axisOf({ range: shared, ...data.x }, all("x"));
    const y = axisOf({ range: shared, ...data.y }, all("y"));
    const px = (v) => LEFT + x.at(v) * (WIDTH - LEFT - RIGHT);
    const py = (v) => HEIGHT - BOTTOM - y.at(v) * (HEIGHT - TOP - BOTTOM);
    const frame = make("g", { "aria-hidden": "true" }, svg);
    for (const [t, text] of x.ticks) {
      make("path", { class: "gridline", d: `M${px(t)},${TOP}V${HEIGHT - BOTTOM}` }, frame);
      make("text", { x: px(t), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" }, frame, text);
    }
    for (const [t, text] of y.ticks) {
      make("path", { class: "gridline", d: `M${LEFT},${py(t)}H${WIDTH - RIGHT}` }, frame);
      make("text", { x: LEFT - 7, y: py(t) + 4, "text-anchor": "end" }, frame, text);
    }
    make("path", { class: "axis", d: `M${LEFT},${TOP}V${HEIGHT - BOTTOM}H${WIDTH - RIGHT}` }, frame);
    make("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 10, "text-anchor": "middle" }, frame, data.x.label);
    const middle = (TOP + HEIGHT - BOTTOM) / 2;
    make("text", { x: 14, y: middle, "text-anchor": "middle", transform: `rotate(-90 14 ${middle})` }, frame, data.y.label);

    const clip = `clip-${figure.id}`;
    make("rect", { x: LEFT, y: TOP, width: WIDTH - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM },
      make("clipPath", { id: clip }, make("defs", {}, svg)));
    const inside = make("g", { "clip-path": `url(#${clip})`, "aria-hidden": "true" }, svg);
    if (data.diagonal) {
      const low = Math.max(x.low, y.low), high = Math.min(x.high, y.high);
      make("path", { class: "guide", d: `M${px(low)},${py(low)}L${px(high)},${py(high)}` }, inside);
    }
    const points = [];
    let curve = 0;
    for (const series of data.series) {
      const shown = series.x.map((_, i) => i).filter((i) =>
        Number.isFinite(series.x[i]) && Number.isFinite(series.y[i]) &&
        (!data.x.log || series.x[i] > 0) && (!data.y.log || series.y[i] > 0));
      if (series.kind === "points") {
        if (series.std && shown.length <= 400)
          for (const i of shown)
            make("path", { class: "bar", d: `M${px(series.x[i])},${py(series.y[i] - series.std[i])}V${py(series.y[i] + series.std[i])}` }, inside);
        for (const i of shown)
          make("circle", { class: "dot", cx: px(series.x[i]).toFixed(1), cy: py(series.y[i]).toFixed(1), r: shown.length > 400 ? 2.4 : 3.6 }, inside);
      } else {
        const d = shown.map((i, k) => `${k ? "L" : "M"}${px(series.x[i]).toFixed(1)},${py(series.y[i]).toFixed(1)}`).join("");
        make("path", { class: series.kind === "guide" ? "guide" : `curve s${curve % 4}`, d }, inside);
        if (series.kind !== "guide" && shown.length <= 20)
          for (const i of shown) make("circle", { class: `mark s${curve % 4}`, cx: px(series.x[i]), cy: py(series.y[i]), r: 3.5 }, inside);
        if (series.kind !== "guide") curve += 1;
      }
      if (series.kind !== "guide")
        for (const i of shown) points.push({ series, i, x: px(series.x[i]), y: py(series.y[i]) });
    }
    legend(figure, data);
    const ring = make("circle", { class: "chosen", r: 7, visibility: "hidden" }, svg);
    let current = -1;
    const show = (index) => {
      current = index;
      const p = points[index];
      ring.setAttribute("cx", p.x);
      ring.setAttribute("cy", p.y);
      ring.setAttribute("visibility", "visible");
      readout.textContent = describe(p.series, p.i);
    };
    const nearest = (event) => {
      const box = svg.getBoundingClientRect();
      const cx = (event.clientX - box.left) * WIDTH / box.width, cy = (event.clientY - box.top) * HEIGHT / box.height;
      let best = -1, least = Infinity;
      points.forEach((p, index) => {
        const d = (p.x - cx) ** 2 + (p.y - cy) ** 2;
        if (d < least) { least = d; best = index; }
      });
      return best;
    };
    svg.onclick = (event) => {
      const index = nearest(event);
      if (index < 0) return;
      show(index);
      choose(points[index].series, points[index].i);
    };
    svg.onkeydown = (event) => {
      if (!points.length) return;
      const moves = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 };
      if (event.key in moves) show(Math.min(points.length - 1, Math.max(0, current + moves[event.key])));
      else if (event.key === "Home") show(0);
      else if (event.key === "End") show(points.length - 1);
      else if (event.key === "Enter" && current >= 0) choose(points[current].series, points[current].i);
      else return;
      event.preventDefault();
    };
  }

  function legend(figure, data) {
    const list = figure.querySelector(".legend");
    list.replaceChildren();
    const entry = (name, shape, attributes) => {
      const item = document.createElement("li");
      const swatch = make("svg", { viewBox: "0 0 29 12", "aria-hidden": "true" }, item);
      make(shape, attributes, swatch);
      item.append(name);
      list.append(item);
    };
    let curve = 0;
    for (const series of data.series) {
      if (series.kind === "points") entry(series.name, "circle", { class: "dot", cx: 14, cy: 6, r: 4 });
      else if (series.kind === "guide") entry(series.name, "path", { class: "guide", d: "M0,6H29" });
      else { entry(series.name, "path", { class: `curve s${curve % 4}`, d: "M0,6H29" }); curve += 1; }
    }
    if (data.diagonal) entry(data.diagonal, "path", { class: "guide", d: "M0,6H29" });
  }

  return { draw, format };
})();
