// Draws the plots of a report from the JSON beside it. Every text goes in as text, never as markup.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const phone = matchMedia("(max-width: 40rem)");
  const touch = matchMedia("(hover: none)").matches;
  const colours = ["#4c7fb5", "#e08a2e", "#4f9d5d", "#d1495b", "#8a6bb8",
    "#3ba3a3", "#c9a227", "#d97fae", "#8c6a4f", "#7d8f3f"];
  const symbols = ["circle", "square", "diamond"];
  const byId = (id) => document.getElementById(id);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // Plotly reads a little markup in its texts: names of classes and layers must not be any.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const shortened = (text, most) => {
    const all = [...String(text)];
    if (all.length <= most) return plain(text);
    const half = Math.floor((most - 1) / 2);
    return plain(all.slice(0, half).join("") + "…" + all.slice(-half).join(""));
  };
  const nameOf = (label) => (label < 0 ? "no label" : data.classes[label]);

  const options = { displayModeBar: false, displaylogo: false, responsive: true };
  const layout = (more) => ({
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: css("--sans"), size: 12, color: css("--faint") },
    margin: { l: 8, r: 8, t: 8, b: 8 },
    showlegend: false,
    dragmode: touch ? false : "zoom",
    hoverlabel: { bgcolor: css("--paper"), bordercolor: css("--faint"), font: { color: css("--ink") } },
    ...more,
  });
  const axis = (more) => ({
    gridcolor: css("--rule"), linecolor: css("--rule"), zeroline: false,
    automargin: true, fixedrange: touch, ...more,
  });
  const draw = (id, traces, more) => {
    const place = byId(id);
    if (place) Plotly.react(place, traces, layout(more), options);
    return place;
  };

  // ---- maps -------------------------------------------------------------------------------------

  const tip = byId("tip");
  const pointAt = (event) => {
    const at = event.points[0].customdata;
    const [image, key, kind] = tip.children;
    const uri = data.thumbnails[data.rows[at]];
    image.hidden = !uri;
    if (uri) image.src = uri; else image.removeAttribute("src");
    key.firstElementChild.textContent = data.keys[at];
    const named = data.labels[at] < 0 ? "" : nameOf(data.labels[at]);
    kind.textContent = [named, data.unread[data.rows[at]]].filter(Boolean).join(", ");
    tip.hidden = false;
    const mouse = event.event.touches?.[0] ?? event.event.changedTouches?.[0] ?? event.event;
    const { width, height } = tip.getBoundingClientRect();
    const left = mouse.clientX + 16 + width > innerWidth ? mouse.clientX - 16 - width : mouse.clientX + 16;
    const top = Math.min(innerHeight - height - 8, mouse.clientY + 12);
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, top)}px`;
  };
  const listened = new WeakSet();
  const listen = (place) => {
    if (!place || listened.has(place)) return;
    listened.add(place);
    place.on("plotly_hover", pointAt);
    place.on("plotly_click", pointAt);
    place.on("plotly_unhover", () => { tip.hidden = true; });
  };
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

  const counts = new Map();
  for (const label of data.labels) counts.set(label, (counts.get(label) ?? 0) + 1);
  const largest = [...counts.keys()].filter((label) => label >= 0)
    .sort((a, b) => counts.get(b) - counts.get(a) || a - b);
  const coloured = largest.slice(0, colours.length).sort((a, b) => a - b);
  const styleOf = new Map(coloured.map((label, i) => [
    label, { color: colours[i], symbol: symbols[i % symbols.length] },
  ]));

  // The groups of points, the grey one first so that it lies below.
  const groups = (chosen) => {
    const own = chosen === "" ? coloured : [Number(chosen)];
    const grey = { name: "", places: [], color: css("--faint"), symbol: "circle", faint: true };
    const found = new Map(own.map((label) => [
      label, { name: nameOf(label), places: [], symbol: "circle", color: css("--accent"), ...styleOf.get(label) },
    ]));
    data.labels.forEach((label, place) => (found.get(label) ?? grey).places.push(place));
    const others = new Set(grey.places.map((place) => data.labels[place]));
    const without = others.delete(-1);
    const names = [];
    if (others.size) names.push(others.size === 1 ? nameOf([...others][0]) : `${others.size} other classes`);
    if (without) names.push("no label");
    grey.name = names.join(", ");
    return [grey, ...found.values()].filter((group) => group.places.length);
  };
  const scatter = (points, chosen) => groups(chosen).map((group) => ({
    type: "scatter", mode: "markers", hoverinfo: "none",
    x: group.places.map((place) => points[0][place]),
    y: group.places.map((place) => points[1][place]),
    customdata: group.places,
    marker: {
      color: group.color, symbol: group.symbol, opacity: group.faint && coloured.length ? 0.3 : 0.8,
      size: data.rows.length > 1500 ? 5 : 7, line: { width: 0 },
    },
  }));
  const drawMaps = () => {
    if (!data.maps.length) return;
    const map = data.maps[Number(byId("map-layer").value)];
    const chosen = byId("map-class").value;
    const bare = { showticklabels: false, ticks: "", showline: true, mirror: true, showgrid: false };
    const titled = (text) => axis({ ...bare, title: { text, font: { size: 11 } } });
    listen(draw("plot-pca", scatter(map.pca, chosen), {
      xaxis: titled(`component 1, ${map.explained[0]} of the variance`),
      yaxis: titled(`component 2, ${map.explained[1]}`), hovermode: "closest",
    }));
    byId("tsne").hidden = !map.tsne;
    if (map.tsne) {
      listen(draw("plot-tsne", scatter(map.tsne, chosen), {
        xaxis: titled(" "), yaxis: titled(" "), hovermode: "closest",
      }));
    }
    const [below, ...own] = groups(chosen);
    const listed = below.faint ? [...own, below] : [below, ...own];
    byId("legend").replaceChildren(...(coloured.length ? listed : []).map((group) => {
      const item = document.createElement("li");
      const dot = document.createElement("i");
      dot.style.background = group.color;
      if (group.symbol !== "circle") dot.style.borderRadius = "1px";
      if (group.symbol === "diamond") dot.style.transform = "rotate(45deg)";
      item.append(dot, group.name);
      return item;
    }));
  };
  const choice = (select, values) => {
    select.replaceChildren(...values.map(([value, text]) => {
      const item = document.createElement("option");
      item.value = value;
      item.textContent = text;
      return item;
    }));
  };
  if (data.maps.length) {
    const layers = byId("map-layer");
    choice(layers, data.maps.map((map, i) => [String(i), map.name]));
    layers.value = String(data.maps.length - 1);
    const inOrder = [...largest].sort((a, b) => a - b);
    choice(byId("map-class"), [["", "all classes"], ...inOrder.map((label) => [String(label), nameOf(label)])]);
    byId("map-class-label").hidden = largest.length < 2;
    layers.addEventListener("change", drawMaps);
    byId("map-class").addEventListener("change", drawMaps);
  }

  // ---- nearest rows -----------------------------------------------------------------------------

  const strips = [...document.querySelectorAll(".strips")];
  if (strips.length) {
    const select = byId("strips-layer");
    choice(select, strips.map((strip, i) => [String(i), strip.dataset.layer]));
    select.value = String(strips.length - 1);
    const show = () => strips.forEach((strip, i) => { strip.hidden = String(i) !== select.value; });
    select.addEventListener("change", show);
    show();
  }

  // ---- the other plots --------------------------------------------------------------------------

  const drawParts = () => {
    if (!data.parts.length) return;
    draw("plot-parts", [{
      type: "scatter", mode: "lines+markers", x: data.parts.map((p) => p[0]), y: data.parts.map((p) => p[1]),
      line: { color: css("--accent"), width: 1.5, shape: "hv" }, marker: { size: 4 },
      hovertemplate: "%{y} rows after %{x:.1f} min<extra></extra>",
    }], {
      xaxis: axis({ title: { text: "minutes" }, rangemode: "tozero" }),
      yaxis: axis({ title: { text: "rows" }, rangemode: "tozero" }),
    });
  };
  const drawNorms = () => {
    const place = byId("plot-norms");
    if (!place || !data.norms.length) return;
    const list = [...data.norms].reverse();
    const log = list.every((each) => each.five[0] > 0);
    place.style.height = `${70 + 30 * list.length}px`;
    const ticks = [];
    for (let power = -12; power <= 12; power += 1) for (const digit of [1, 2, 5]) ticks.push(digit * 10 ** power);
    const written = ticks.map((v) => (v >= 1e5 || v < 1e-3 ? v.toExponential(0) : String(Number(v.toPrecision(1)))));
    const scale = log ? { type: "log", tickvals: ticks, ticktext: written } : {};
    draw("plot-norms", [{
      type: "box", orientation: "h", y: list.map((_, i) => i),
      lowerfence: list.map((each) => each.five[0]), q1: list.map((each) => each.five[1]),
      median: list.map((each) => each.five[2]), q3: list.map((each) => each.five[3]),
      upperfence: list.map((each) => each.five[4]),
      line: { color: css("--accent"), width: 1.2 }, hoverinfo: "x", width: 0.5,
    }], {
      xaxis: axis({ ...scale, title: { text: log ? "L2 norm, logarithmic" : "L2 norm" } }),
      yaxis: axis({
        tickvals: list.map((_, i) => i), showgrid: false,
        ticktext: list.map((each) => shortened(each.name, phone.matches ? 14 : 40)),
      }),
    });
  };
  const grid = (id, names, values, texts, hover, most) => {
    const place = byId(id);
    if (!place || !names.length) return;
    const width = phone.matches ? 10 : 22;
    const labels = names.map((name) => shortened(name, width));
    const places = names.map((_, i) => i);
    place.style.height = `${Math.min(760, 120 + Math.max(30, phone.matches ? 16 : 22) * names.length)}px`;
    draw(id, [{
      type: "heatmap", z: values, x: places, y: places, customdata: hover, zmin: 0, zmax: 1,
      colorscale: [[0, css("--soft")], [1, css("--accent")]], showscale: false, xgap: 1, ygap: 1,
      ...(names.length <= most ? { text: texts, texttemplate: "%{text}", textfont: { size: 11 } } : {}),
      hovertemplate: "%{customdata}<extra></extra>",
    }], {
      xaxis: axis({ tickvals: places, ticktext: labels, tickangle: -45, showgrid: false, fixedrange: true }),
      yaxis: axis({ tickvals: places, ticktext: labels, autorange: "reversed", showgrid: false, fixedrange: true }),
    });
  };
  const drawGrids = () => {
    if (data.confusion) {
      const { classes, counts: rows } = data.confusion;
      const sums = rows.map((row) => row.reduce((a, b) => a + b, 0));
      grid("plot-confusion", classes, rows.map((row, i) => row.map((n) => n / Math.max(1, sums[i]))),
        rows.map((row) => row.map((n) => (n ? String(n) : ""))),
        rows.map((row, i) => row.map((n, j) => `${n} of ${plain(classes[i])}<br>taken for ${plain(classes[j])}`)),
        phone.matches ? 12 : 25);
    }
    const { layers, cka, debiased } = data.similarity;
    for (const [id, table] of [["plot-cka", cka], ["plot-debiased", debiased]]) {
      const texts = table.map((row) => row.map((v) => (v === null ? "–" : v.toFixed(2))));
      const hover = texts.map((row, i) => row.map((v, j) => `${v}<br>${plain(layers[i])}<br>${plain(layers[j])}`));
      grid(id, table.length ? layers : [], table, texts, hover, phone.matches ? 7 : 10);
    }
  };

  const drawAll = () => { drawMaps(); drawParts(); drawNorms(); drawGrids(); };
  drawAll();
  dark.addEventListener("change", drawAll);
  phone.addEventListener("change", drawAll);
})();
