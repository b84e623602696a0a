"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (selector) => document.querySelector(selector);
  const root = document.documentElement;
  const say = Plot.format;

  // Light and dark: the system's wish, until the button is used.
  const wish = window.matchMedia("(prefers-color-scheme: dark)");
  const theme = (dark) => {
    root.dataset.theme = dark ? "dark" : "light";
    find("#theme").textContent = dark ? "Light" : "Dark";
    find("#theme").setAttribute("aria-label", dark ? "Use light colours" : "Use dark colours");
    if (Viewer.ready()) Viewer.background();
  };
  const wished = () => theme(wish.matches);
  wish.addEventListener("change", wished);
  find("#theme").addEventListener("click", () => {
    wish.removeEventListener("change", wished);
    theme(root.dataset.theme !== "dark");
  });

  // Structures in 3D, atoms coloured by std.
  const Viewer = (() => {
    const STOPS = [[70, 100, 180], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
    let viewer = null, set = null, shown = -1;
    const colour = (share) => {
      const t = Math.min(0.9999, Math.max(0, share)) * (STOPS.length - 1), k = Math.floor(t);
      const mixed = STOPS[k].map((c, i) => Math.round(c + (STOPS[k + 1][i] - c) * (t - k)));
      return "#" + mixed.map((c) => c.toString(16).padStart(2, "0")).join("");
    };
    const ready = () => viewer !== null;
    const background = () => {
      viewer.setBackgroundColor(getComputedStyle(root).getPropertyValue("--viewer").trim());
      viewer.render();
    };
    const start = () => {
      if (viewer) return true;
      try {
        viewer = $3Dmol.createViewer(find("#viewer"), { antialias: true, disableFog: true });
        const canvas = find("#viewer canvas");
        canvas.setAttribute("aria-hidden", "true");
        background();
        return true;
      } catch (error) {
        viewer = null;
        find("#viewer").textContent = "This browser shows no 3D graphics (WebGL); the table has the numbers.";
        return false;
      }
    };
    const labels = (structure) => {
      viewer.removeAllLabels();
      if (!find("#labels").checked) return;
      structure.symbols.forEach((symbol, i) => viewer.addLabel(`${symbol} ${say(structure.std[i])}`, {
        position: { x: structure.positions[i][0], y: structure.positions[i][1], z: structure.positions[i][2] },
        fontSize: 12, fontColor: "white", backgroundColor: "black", backgroundOpacity: 0.75, inFront: true,
      }));
    };
    const cell = (structure) => {
      if (!structure.cell) return;
      const [a, b, c] = structure.cell, plus = (...v) => v.reduce((s, w) => s.map((x, i) => x + w[i]), [0, 0, 0]);
      const point = ([x, y, z]) => ({ x, y, z }), edge = (p, q) =>
        viewer.addLine({ start: point(p), end: point(q), color: "#808a99" });
      for (const [u, v, w] of [[a, b, c], [b, a, c], [c, a, b]])
        for (const from of [[0, 0, 0], v, w, plus(v, w)]) edge(from, plus(from, u));
    };
    const paint = (structure, keepView) => {
      viewer.removeAllModels();
      viewer.removeAllShapes();
      const rows = structure.symbols.map((s, i) => `${s} ${structure.positions[i].join(" ")}`);
      viewer.addModel(`${rows.length}\n\n${rows.join("\n")}\n`, "xyz");
      structure.std.forEach((std, i) => {
        const color = colour(std / set.std_max);
        viewer.setStyle({ index: i }, { sphere: { scale: 0.28, color }, stick: { radius: 0.11, color } });
      });
      cell(structure);
      labels(structure);
      if (!keepView) {
        viewer.zoomTo();
        if (structure.symbols.length < 12) viewer.zoom(1.7);
      }
      viewer.render();
    };
    const table = (structure) => {
      const body = find("#atoms tbody");
      body.replaceChildren();
      const order = structure.std.map((_, i) => i).sort((i, j) => structure.std[j] - structure.std[i]);
      for (const i of order.slice(0, 100)) {
        const row = body.insertRow();
        const error = structure.error ? say(structure.error[i]) : "-";
        [`${structure.symbols[i]} ${i}`, say(structure.std[i]), error].forEach((text) => {
          row.insertCell().textContent = text;
        });
      }
    };
    const show = (k, keepView) => {
      shown = k;
      const structure = set.structures[k];
      find("#which").value = String(k);
      const worst = structure.std.indexOf(Math.max(...structure.std));
      const text = `Structure ${structure.index}, ${structure.formula}: the largest std of a force is ` +
        `${say(structure.std[worst])} eV/Å, on atom ${worst} (${structure.symbols[worst]}).`;
      find("#said").textContent = text;
      find("#viewer").setAttribute("aria-label", "3D view. " + text);
      table(structure);
      if (start()) paint(structure, keepView);
    };
    const use = (chosen) => {
      set = chosen;
      const select = find("#which");
      select.replaceChildren();
      set.structures.forEach((s, k) => select.append(new Option(`${s.index}: ${s.formula}, std ${say(s.std_max)} eV/Å`, k)));
      find("#most").textContent = say(set.std_max);
      if (set.structures.length) show(0);
    };
    const has = (index) => set.structures.findIndex((s) => s.index === index);
    const turn = (axis, angle) => { if (viewer) { viewer.rotate(angle, axis); viewer.render(); } };
    const zoom = (factor) => { if (viewer) { viewer.zoom(factor); viewer.render(); } };
    const step = (by) => show((shown + by + set.structures.length) % set.structures.length);
    const relabel = () => { if (viewer) { labels(set.structures[shown]); viewer.render(); } };
    const reset = () => { if (viewer) { viewer.setView([0, 0, 0, 0, 0, 0, 0, 1]); paint(set.structures[shown]); } };
    const resize = () => { viewer.resize(); viewer.render(); };
    return { ready, background, resize, use, show, has, turn, zoom, step, relabel, reset };
  })();

  const where = (series, i) => {
    if (series.structure === undefined) return "";
    const atom = series.atom === undefined ? "" : `, atom ${series.atom[i]}`;
    const part = series.component === undefined ? "" : `, ${"xyz"[series.component[i]]}`;
    return `Structure ${series.structure[i]}${atom}${part}. `;
  };
  const describe = (plot) => (series, i) => {
    const std = series.std === undefined ? "" : ` ± ${say(series.std[i])}`;
    return `${where(series, i) || series.name + ". "}${plot.x.label}: ${say(series.x[i])}; ` +
      `${plot.y.label}: ${say(series.y[i])}${std}.`;
  };
  const choose = (series, i) => {
    if (series.structure === undefined || !find("#which")) return;
    const k = Viewer.has(series.structure[i]);
    if (k >= 0) Viewer.show(k);
  };

  let current = 0;
  const drawAll = () => {
    if (data.sets.length) document.querySelectorAll("figure[data-plot]").forEach((figure) => {
      const plot = data.sets[current].plots[figure.dataset.plot];
      figure.hidden = plot === undefined;
      if (plot !== undefined) {
        figure.querySelector(".note").textContent = plot.note;
        Plot.draw(figure, plot, describe(plot), choose);
      }
    });
    for (const [id, plot] of Object.entries(data.figures))
      Plot.draw(document.getElementById(id), plot, describe(plot), () => {});
  };
  const useSet = (index) => {
    current = index;
    const set = data.sets[index];
    drawAll();
    if (find("#which")) Viewer.use(set);
    document.querySelectorAll("input[name=set], input[name=set3d]").forEach((input) => {
      input.checked = Number(input.value) === index;
    });
  };

  theme(wish.matches);
  document.querySelectorAll("input[name=set], input[name=set3d]").forEach((input) =>
    input.addEventListener("change", () => useSet(Number(input.value))));
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    drawAll();
    if (Viewer.ready()) Viewer.resize();
  });
  if (find("#which")) {
    find("#which").addEventListener("change", (event) => Viewer.show(Number(event.target.value)));
    find("#labels").addEventListener("change", Viewer.relabel);
    const actions = {
      previous: () => Viewer.step(-1), next: () => Viewer.step(1), reset: Viewer.reset,
      left: () => Viewer.turn("y", -15), right: () => Viewer.turn("y", 15),
      up: () => Viewer.turn("x", -15), down: () => Viewer.turn("x", 15),
      closer: () => Viewer.zoom(1.25), away: () => Viewer.zoom(0.8),
    };
    document.querySelectorAll("button[data-act]").forEach((button) =>
      button.addEventListener("click", () => actions[button.dataset.act]()));
    const keys = { ArrowLeft: "left", ArrowRight: "right", ArrowUp: "up", ArrowDown: "down", "+": "closer", "-": "away" };
    find("#viewer").addEventListener("keydown", (event) => {
      if (!(event.key in keys)) return;
      actions[keys[event.key]]();
      event.preventDefault();
    });
  }
  if (data.sets.length) useSet(0);
  else drawAll();
  root.dataset.ready = "true";
})();
