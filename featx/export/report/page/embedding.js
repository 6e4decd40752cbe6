// Draws the embedding plot on a canvas. Texts are set as text, never as markup.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("canvas");
  if (!canvas || !data.layers.length) return;
  const context = canvas.getContext("2d");
  const tip = document.getElementById("tip");
  const byId = (id) => document.getElementById(id);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const COLOURS = ["#4269d0", "#d99000", "#e8503a", "#2fa08c", "#3ca951", "#e0559a", "#8f56e8", "#6f9bef", "#9c6b4e", "#7b828c"];
  const SHAPES = 5, TEST = data.role_names.indexOf("test"), NAMED = 12;
  const state = { layer: Math.max(0, data.layers.findIndex((each) => each.name === data.best)), kind: "tsne", marks: "points", label: null };
  const counts = new Map();
  for (const label of data.labels) if (label >= 0) counts.set(label, (counts.get(label) || 0) + 1);
  const labels = [...counts.keys()].sort((a, b) => a - b);
  const largest = [...labels].sort((a, b) => counts.get(b) - counts.get(a)).slice(0, NAMED);
  const colourOf = (label) => (label < 0 ? css("--muted") : COLOURS[label % COLOURS.length]);
  const shapeOf = (label) => (label < 0 ? 0 : (label + Math.floor(label / COLOURS.length)) % SHAPES);
  let points = [], order = [], width = 0, height = 0, hot = -1;

  const sheet = new Image();
  sheet.addEventListener("load", () => draw());
  if (data.sprite.uri) sheet.src = data.sprite.uri;
  const tile = (place, target, x, y, side) => {
    const number = data.sprite.place[place];
    if (number < 0 || !sheet.complete || !sheet.naturalWidth) return false;
    const { columns, pixels } = data.sprite;
    target.drawImage(sheet, (number % columns) * pixels, Math.floor(number / columns) * pixels, pixels, pixels, x, y, side, side);
    return true;
  };

  const outline = (g, shape, x, y, r) => {
    const corners = [null, 4, 3, 4, 3][shape];
    const turn = [0, Math.PI / 4, -Math.PI / 2, 0, Math.PI / 2][shape];
    g.beginPath();
    if (!corners) { g.arc(x, y, r, 0, 7); return; }
    for (let i = 0; i < corners; i += 1) {
      const angle = turn + (2 * Math.PI * i) / corners;
      g.lineTo(x + 1.3 * r * Math.cos(angle), y + 1.3 * r * Math.sin(angle));
    }
    g.closePath();
  };

  const arrange = () => {
    const box = canvas.getBoundingClientRect(), ratio = window.devicePixelRatio || 1;
    [width, height] = [box.width, box.height];
    [canvas.width, canvas.height] = [width * ratio, height * ratio];
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const layer = data.layers[state.layer];
    const [xs, ys] = layer[state.kind] || layer.pca;
    const margin = width < 500 ? 20 : 34;
    const [spanX, spanY] = [Math.max(1, ...xs), Math.max(1, ...ys)];
    const scale = Math.min((width - 2 * margin) / spanX, (height - 2 * margin) / spanY);
    const left = (width - scale * spanX) / 2, low = (height - scale * spanY) / 2;
    points = xs.map((x, i) => [left + scale * x, height - low - scale * ys[i]]);
    order = points.map((_, i) => i).sort((a, b) => (a in layer.wrong) - (b in layer.wrong));
    draw();
  };

  const draw = () => {
    const layer = data.layers[state.layer], small = width < 500;
    const [ink, ground] = [css("--ink"), css("--bg")];
    const radius = (small ? 3.4 : 4.4) * (points.length > 1200 ? 0.75 : 1);
    context.clearRect(0, 0, width, height);
    for (const i of order) {
      const [x, y] = points[i], label = data.labels[i];
      const other = state.label !== null && label !== state.label;
      context.globalAlpha = other ? 0.12 : 1;
      const side = small ? 20 : 30;
      if (state.marks === "images" && tile(i, context, x - side / 2, y - side / 2, side)) {
        context.lineWidth = 2;
        context.strokeStyle = colourOf(label);
        context.strokeRect(x - side / 2, y - side / 2, side, side);
      } else {
        outline(context, shapeOf(label), x, y, radius);
        context.fillStyle = colourOf(label);
        context.fill();
        context.lineWidth = 1;
        context.strokeStyle = ground;
        context.stroke();
      }
      if (i in layer.wrong) ring(x, y, small ? 8 : 10, 2, ink);
    }
    context.globalAlpha = 1;
    if (state.marks === "points") names(ink, ground, small);
    if (hot >= 0) ring(...points[hot], 9, 3, ink);
  };
  const ring = (x, y, r, line, colour) => {
    context.beginPath();
    context.arc(x, y, r, 0, 7);
    context.lineWidth = line;
    context.strokeStyle = colour;
    context.stroke();
  };
  const middle = (values) => values.sort((a, b) => a - b)[values.length >> 1];
  const names = (ink, ground, small) => {
    context.font = `600 ${small ? 12 : 13}px ${css("--sans")}`;
    context.textAlign = "center";
    context.lineJoin = "round";
    const taken = [];
    const shown = state.label === null ? largest : [state.label].filter((label) => label >= 0);
    for (const label of shown) {
      const mine = order.filter((i) => data.labels[i] === label).map((i) => points[i]);
      const text = data.classes[label], half = context.measureText(text).width / 2 + 4;
      const x = Math.max(half, Math.min(width - half, middle(mine.map((p) => p[0]))));
      let y = middle(mine.map((p) => p[1])) + 4;
      for (let go = 0; go < 20 && taken.some((t) => Math.abs(t[0] - x) < t[2] + half && Math.abs(t[1] - y) < 17); go += 1) y += 6;
      taken.push([x, y, half]);
      context.lineWidth = 5;
      context.strokeStyle = ground;
      context.strokeText(text, x, y);
      context.fillStyle = ink;
      context.fillText(text, x, y);
    }
  };

  const nearest = (event) => {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let best = -1, least = 400;
    points.forEach(([px, py], i) => {
      if (state.label !== null && data.labels[i] !== state.label) return;
      const distance = (px - x) ** 2 + (py - y) ** 2;
      if (distance < least) [best, least] = [i, distance];
    });
    return best;
  };
  const point = (place, event) => {
    if (place !== hot) { hot = place; draw(); }
    tip.hidden = place < 0;
    if (place < 0) return;
    const preview = tip.querySelector("canvas"), blank = tip.querySelector("i");
    const target = preview.getContext("2d");
    target.imageSmoothingQuality = "high";
    preview.hidden = !tile(place, target, 0, 0, preview.width);
    blank.hidden = !preview.hidden;
    blank.textContent = data.unread[place] || "no image";
    const label = data.labels[place], said = data.layers[state.layer].wrong[place];
    tip.querySelector("b").textContent = label < 0 ? "no label" : data.classes[label];
    const role = data.role_names[data.roles[place] || 0];
    let text = role;
    if (data.roles[place] === TEST) text += said === undefined ? ", predicted correctly" : `, predicted ${said}`;
    tip.querySelector("span").textContent = text;
    tip.querySelector("small").textContent = data.keys[place];
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 16, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(8, Math.min(event.clientY - tip.offsetHeight / 2, innerHeight - tip.offsetHeight - 8))}px`;
  };
  canvas.addEventListener("pointermove", (event) => point(nearest(event), event));
  canvas.addEventListener("pointerdown", (event) => point(nearest(event), event));
  // A finger leaves the plot when it is lifted: its image stays until something else is tapped.
  canvas.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") point(-1, event); });
  document.addEventListener("pointerdown", (event) => { if (event.target !== canvas) point(-1, event); });
  document.addEventListener("scroll", (event) => point(-1, event), { passive: true });

  for (const group of document.querySelectorAll(".seg")) {
    group.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      for (const other of group.children) other.setAttribute("aria-pressed", String(other === button));
      state[group.dataset.sets] = button.value;
      arrange();
    });
  }
  const select = byId("layer");
  data.layers.forEach((layer, i) => select.add(new Option(layer.name, String(i))));
  select.value = String(state.layer);
  select.addEventListener("change", () => { state.layer = Number(select.value); arrange(); });

  const legend = byId("legend");
  for (const label of labels) {
    const item = document.createElement("li"), button = document.createElement("button");
    const mark = document.createElement("canvas"), number = document.createElement("small");
    const text = document.createElement("span");
    mark.width = mark.height = 28;
    const g = mark.getContext("2d");
    g.scale(2, 2);
    outline(g, shapeOf(label), 7, 7, 4.4);
    g.fillStyle = colourOf(label);
    g.fill();
    text.textContent = data.classes[label];
    number.textContent = String(counts.get(label));
    button.type = "button";
    button.append(mark, text, number);
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => {
      state.label = state.label === label ? null : label;
      for (const other of legend.querySelectorAll("button")) {
        other.setAttribute("aria-pressed", String(other === button && state.label !== null));
      }
      draw();
    });
    item.append(button);
    legend.append(item);
  }
  if (!data.layers.some((layer) => layer.tsne)) state.kind = "pca";
  addEventListener("resize", arrange);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  arrange();
})();
