(async () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const nQueries = data.queries.length, nKeys = data.keys.length, cells = nQueries * nKeys;
  const layerBox = byId("layer"), headBox = byId("head"), queryBox = byId("query");
  // colour maps as a few anchors: viridis, and purple-white-orange with orange for "more weight"
  const VIRIDIS = [[68,1,84],[71,44,122],[59,81,139],[44,113,142],[33,144,141],[39,173,129],[92,200,99],[170,220,50],[253,231,37]];
  const PUOR = [[127,59,8],[179,88,6],[224,130,20],[253,184,99],[247,247,247],[178,171,210],[128,115,172],[84,39,136],[45,0,75]];
  const colour = (anchors, x) => {
    const at = Math.min(Math.max(x, 0), 1) * (anchors.length - 1), i = Math.min(Math.floor(at), anchors.length - 2), f = at - i;
    return anchors[i].map((a, c) => a + f * (anchors[i + 1][c] - a));
  };
  const ramp = (id, anchors) => { byId(id).style.background = `linear-gradient(90deg,${anchors.map((c) => `rgb(${c})`).join(",")})`; };
  ramp("ramp-weight", VIRIDIS); ramp("ramp-written", VIRIDIS); ramp("ramp-gap", PUOR);

  const inflate = async (text) => {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).arrayBuffer();
  };
  const opened = new Map();
  const openLayer = async (index) => {
    if (!opened.has(index)) {
      const packed = data.layers[index], layer = {};
      for (const name of ["weight", "written", "together"]) layer[name] = packed[name] ? new Uint8Array(await inflate(packed[name])) : null;
      for (const name of ["rowWritten", "rowTogether"]) layer[name] = packed[name] ? new Float32Array(await inflate(packed[name])) : null;
      opened.set(index, layer);
    }
    return opened.get(index);
  };
  const share = (byte) => (byte / 255) ** 2;
  const option = (box, value, text) => { const o = document.createElement("option"); o.value = value; o.textContent = text; box.append(o); };
  data.layers.forEach((layer, i) => option(layerBox, i, layer.certified ? layer.label : `${layer.label} (not certified)`));
  data.queryTokens.forEach((token, i) => option(queryBox, i, `${data.queries[i]}: ${token}`));
  queryBox.value = nQueries - 1; layerBox.value = data.start;

  let maps = null, head = -1;
  // head -1 is all heads: mean weight, and the layer's own contribution
  const read = () => {
    const n = data.layers[Number(layerBox.value)].heads, { weight, written, together } = maps;
    if (head >= 0) {
      const from = head * cells;
      return {
        w: (c) => share(weight[from + c]), c: written ? (c) => share(written[from + c]) : null,
        total: maps.rowWritten ? (q) => maps.rowWritten[head * nQueries + q] : null,
      };
    }
    return {
      w: (c) => { let sum = 0; for (let h = 0; h < n; h++) sum += share(weight[h * cells + c]); return sum / n; },
      c: together ? (c) => share(together[c]) : null, total: maps.rowTogether ? (q) => maps.rowTogether[q] : null,
    };
  };
  const percent = (x) => `${(100 * x).toFixed(1)} %`;
  const draw = (id, anchors, value) => {
    const canvas = byId(id), context = canvas.getContext("2d");
    canvas.width = nKeys; canvas.height = nQueries; canvas.style.aspectRatio = `${nKeys} / ${nQueries}`;
    const image = context.createImageData(nKeys, nQueries);
    for (let c = 0; c < cells; c++) {
      const x = value(c);
      if (x === null) continue;
      const [r, g, b] = colour(anchors, x);
      image.data.set([r, g, b, 255], 4 * c);
    }
    context.putImageData(image, 0, 0);
  };
  const key = (j) => `${data.keyTokens[j]} (${data.keys[j]})`;
  const tell = (q, j) => {
    const { w, c, total } = read(), cell = q * nKeys + j;
    const parts = [`query ${data.queryTokens[q]} (${data.queries[q]}) reads ${key(j)}: weight ${percent(w(cell))}`];
    if (c) parts.push(`${percent(c(cell))} of what ${head < 0 ? "the layer" : "the head"} writes (${total(q).toPrecision(3)} in residual norm)`);
    byId("where").textContent = parts.join(", ");
  };
  const drawRow = () => {
    const q = Number(queryBox.value), { w, c, total } = read(), row = byId("row"), together = head >= 0 && maps.together;
    row.replaceChildren();
    let weight = 0;
    for (let j = 0; j < nKeys; j++) {
      const cell = q * nKeys + j, item = document.createElement("li"), press = document.createElement("button");
      weight += w(cell);
      press.type = "button";
      if (data.keys[j] === data.queries[q]) press.className = "query"; else if (data.keys[j] > data.queries[q]) press.className = "after";
      const bars = document.createElement("span"); bars.className = "bars"; bars.setAttribute("aria-hidden", "true");
      const bar = (name, x) => { const i = document.createElement("i"); i.className = name; i.style.height = `${100 * x}%`; bars.append(i); };
      bar("w", w(cell)); if (c) bar(head < 0 ? "t" : "c", c(cell)); if (together) bar("t", share(maps.together[cell]));
      const text = document.createElement("bdi"); text.textContent = data.keyTokens[j];
      const numbers = [`weight ${percent(w(cell))}`]; if (c) numbers.push(`contribution ${percent(c(cell))}`);
      press.title = `${data.keys[j]}: ${numbers.join(", ")}`; press.setAttribute("aria-label", `${data.keyTokens[j]}, ${press.title}`);
      press.append(bars, text);
      press.addEventListener("click", () => { const at = data.queries.indexOf(data.keys[j]); if (at >= 0) { queryBox.value = at; drawRow(); } else tell(q, j); });
      press.addEventListener("focus", () => tell(q, j));
      press.addEventListener("mouseenter", () => tell(q, j));
      item.append(press); row.append(item);
    }
    const rest = 1 - weight, outside = rest > 0.02 ? `; ${percent(rest)} of the weight is on no key shown here` : "";
    byId("where").textContent = `query ${data.queryTokens[q]} (${data.queries[q]})` +
      (total ? `: ${head < 0 ? "the layer" : "the head"} writes ${total(q).toPrecision(3)} (residual norm, summed over keys)` : "") + outside;
  };
  const redraw = () => {
    const { w, c } = read();
    byId("written-title").textContent = head < 0 ? "Contribution of the layer ‖Σ A·f‖" : "Head contribution A·‖f‖";
    // a cell that no head reads is the future, or a key out of reach: blank
    const blank = (cell) => { for (let h = 0; h < data.layers[Number(layerBox.value)].heads; h++) if (maps.weight[h * cells + cell]) return false; return true; };
    const hidden = Array.from({ length: cells }, (_, cell) => blank(cell));
    draw("map-weight", VIRIDIS, (cell) => hidden[cell] ? null : w(cell));
    draw("map-written", VIRIDIS, (cell) => hidden[cell] || !c ? null : c(cell));
    draw("map-gap", PUOR, (cell) => hidden[cell] || !c ? null : (c(cell) - w(cell) + 1) / 2);
    drawRow();
  };
  const chooseLayer = async () => {
    const index = Number(layerBox.value), before = headBox.value;
    maps = await openLayer(index);
    headBox.replaceChildren();
    option(headBox, -1, "all (mean weight, layer's contribution)");
    for (let h = 0; h < data.layers[index].heads; h++) option(headBox, h, String(h));
    headBox.value = before !== "" && Number(before) < data.layers[index].heads ? before : "-1";
    head = Number(headBox.value);
    redraw();
    if (data.layers[index].note) byId("where").textContent = `layer ${data.layers[index].label}: ${data.layers[index].note}`;
    document.documentElement.dataset.ready = "yes";
  };
  layerBox.addEventListener("change", chooseLayer);
  headBox.addEventListener("change", () => { head = Number(headBox.value); redraw(); });
  queryBox.addEventListener("change", drawRow);
  for (const id of ["map-weight", "map-written", "map-gap"]) {
    const canvas = byId(id);
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      const clip = (x, n) => Math.min(Math.max(Math.floor(x * n), 0), n - 1);
      return [clip((event.clientY - box.top) / box.height, nQueries), clip((event.clientX - box.left) / box.width, nKeys)];
    };
    let here = [nQueries - 1, 0];
    canvas.addEventListener("pointermove", (event) => tell(...(here = at(event))));
    canvas.addEventListener("click", (event) => { here = at(event); queryBox.value = here[0]; drawRow(); tell(...here); });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (event.key === "Enter") { queryBox.value = here[0]; drawRow(); }
      if (!step) return;
      event.preventDefault();
      here = [Math.min(Math.max(here[0] + step[0], 0), nQueries - 1), Math.min(Math.max(here[1] + step[1], 0), nKeys - 1)];
      tell(...here);
    });
  }
  const stepBox = (box, by) => {
    const next = box.selectedIndex + by;
    if (next >= 0 && next < box.options.length) { box.selectedIndex = next; box.dispatchEvent(new Event("change")); }
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(SELECT|INPUT)$/.test(event.target.tagName)) return;
    const move = { ",": [layerBox, -1], ".": [layerBox, 1], "[": [headBox, -1], "]": [headBox, 1] }[event.key];
    if (move) { event.preventDefault(); stepBox(...move); }
  });
  await chooseLayer();
})();
