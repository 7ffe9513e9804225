(async () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const make = (name, set = {}, ...children) => { const node = Object.assign(document.createElement(name), set); node.append(...children); return node; };
  const nQueries = data.queries.length, nKeys = data.keys.length, cells = nQueries * nKeys;
  const layerBox = byId("layer"), headBox = byId("head"), queryBox = byId("query"), statBox = byId("stat"), asideBox = byId("aside");
  const sinks = new Set(data.sinks);
  // colour maps as a few anchors: viridis, and purple-white-orange with orange below 0
  const VIRIDIS = [[68,1,84],[71,44,122],[59,81,139],[44,113,142],[33,144,141],[39,173,129],[92,200,99],[170,220,50],[253,231,37]];
  const PUOR = [[127,59,8],[179,88,6],[224,130,20],[253,184,99],[247,247,247],[178,171,210],[128,115,172],[84,39,136],[45,0,75]];
  const SET_ASIDE = [150, 150, 158];
  const colour = (anchors, x) => {
    const at = Math.min(Math.max(x, 0), 1) * (anchors.length - 1), i = Math.min(Math.floor(at), anchors.length - 2), f = at - i;
    return anchors[i].map((a, c) => Math.round(a + f * (anchors[i + 1][c] - a)));
  };
  const ramp = (id, anchors) => { const node = byId(id); if (node) node.style.background = `linear-gradient(90deg,${anchors.map((c) => `rgb(${c})`).join(",")})`; };
  for (const id of ["weight", "written", "grid", "pooledWeight", "pooledWritten"]) ramp(`ramp-${id}`, VIRIDIS);
  for (const id of ["effect", "gap"]) ramp(`ramp-${id}`, PUOR);
  const MINUS = "\u2212";
  const three = (x) => (x === 0 || Math.abs(x) >= 0.0005 ? x.toFixed(3) : x.toExponential(1)).replace("-", MINUS);

  const inflate = async (text) => {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer());
  };
  // high bytes alone, or with the low ones: integers of 16 bits, a square root each
  const share = ([high, low]) => low ? (c) => ((high[c] * 256 + low[c]) / 65535) ** 2 : (c) => (high[c] ? ((high[c] + 0.5) / 256) ** 2 : 0);
  const signed = ([high, low], scale) => (c) => {
    const code = low ? high[c] * 256 + low[c] - 32768 : high[c] === 128 ? 0 : high[c] * 256 + 128 - 32768;
    return Math.sign(code) * (code / 32767) ** 2 * scale;
  };
  const opened = new Map();
  const openLayer = async (index) => {
    if (!opened.has(index)) {
      const packed = data.layers[index], layer = { heads: packed.heads, fine: packed.fine, seen: await inflate(packed.seen) };
      for (const [name, planes] of Object.entries(packed.maps)) {
        const read = await Promise.all(planes.map(inflate));
        layer[name] = name === "effect" ? signed(read, packed.scale) : share(read);
      }
      for (const name of ["rowWritten", "rowTogether"]) layer[name] = packed[name] ? new Float32Array((await inflate(packed[name])).buffer) : null;
      opened.set(index, layer);
    }
    return opened.get(index);
  };
  const option = (box, value, text) => box.append(make("option", { value, textContent: text }));
  data.layers.forEach((layer, i) => option(layerBox, i, layer.certified ? layer.label : `${layer.label} (not certified)`));
  data.queryTokens.forEach((token, i) => option(queryBox, i, `${data.queries[i]}: ${token}`));
  data.grid.forEach((stat, i) => option(statBox, i, stat.name));
  queryBox.value = data.target >= 0 ? data.target : nQueries - 1;
  layerBox.value = data.start;

  // ------------------------------------------------------------------ what is chosen
  let layer = null, shownLayer = data.start, head = -1, method = "row";
  const query = () => Number(queryBox.value);
  const aside = () => asideBox.checked;
  const seen = (c) => (layer.seen[c >> 3] >> (7 - (c & 7))) & 1;
  const shown = (c) => !(aside() && sinks.has(c % nKeys));
  // head -1 is all heads: mean weight, the layer's own contribution, summed effects
  const read = () => {
    const n = layer.heads, { weight, written, together, effect } = layer;
    if (head >= 0) {
      const from = head * cells;
      return {
        w: (c) => weight(from + c), c: written ? (c) => written(from + c) : null, e: effect ? (c) => effect(from + c) : null,
        total: layer.rowWritten ? (q) => layer.rowWritten[head * nQueries + q] : null,
      };
    }
    const sum = (f, c) => { let total = 0; for (let h = 0; h < n; h++) total += f(h * cells + c); return total; };
    return {
      w: (c) => sum(weight, c) / n, c: together ? (c) => together(c) : null, e: effect ? (c) => sum(effect, c) : null,
      total: layer.rowTogether ? (q) => layer.rowTogether[q] : null,
    };
  };
  const name = () => `L${data.layers[shownLayer].label}${head < 0 ? " all heads" : `H${head}`}`;
  const exactRow = (q) => data.exact && q === data.target;

  // ------------------------------------------------------------------ words
  const key = (j) => `${data.keyTokens[j]} (${data.keys[j]})`;
  const tell = (q, j) => {
    const { w, c, e, total } = read(), cell = q * nKeys + j;
    const parts = [`${name()}, query ${data.queryTokens[q]} (${data.queries[q]}) reads ${key(j)}: weight ${three(w(cell))}`];
    if (c) parts.push(`${three(c(cell))} of what ${head < 0 ? "the layer" : "the head"} writes (${total ? total(q).toPrecision(3) : "?"} in residual norm)`);
    if (e && seen(cell) && (data.firstOrder || exactRow(q))) parts.push(`effect ${three(e(cell))} ${data.unit} (${exactRow(q) ? "exact" : "first order"})`);
    byId("where").textContent = parts.join(", ") + (layer.fine ? "" : " (\u00b1.004)");
  };

  // ------------------------------------------------------------------ maps
  const paint = (id, width, height, at) => {
    const canvas = byId(id);
    if (!canvas) return;
    const context = canvas.getContext("2d"), image = context.createImageData(width, height);
    canvas.width = width; canvas.height = height; canvas.style.aspectRatio = `${width} / ${height}`;
    for (let c = 0; c < width * height; c++) {
      const rgb = at(c);
      if (rgb) image.data.set([...rgb, 255], 4 * c);
    }
    context.putImageData(image, 0, 0);
  };
  const largest = (f) => { let top = 0; for (let c = 0; c < cells; c++) if (seen(c) && shown(c)) top = Math.max(top, Math.abs(f(c))); return top; };
  const drawMaps = () => {
    const { w, c, e } = read();
    byId("written-title").textContent = head < 0 ? "Contribution of the layer \u2016\u03a3 A\u00b7f\u2016" : "Head contribution A\u00b7\u2016f\u2016";
    const top = aside() ? Math.max(largest(w), c ? largest(c) : 0) || 1 : 1;
    const gap = c ? (x) => c(x) - w(x) : null;
    const span = aside() && gap ? largest(gap) || 1 : 1;
    const effectTop = e ? largest(e) || 1 : 1;
    const end = (id, text) => { if (byId(id)) byId(id).textContent = text; };
    end("end-weight", `${top === 1 ? 1 : three(top)} (mass)`); end("end-written", `${top === 1 ? 1 : three(top)} (share of row)`);
    end("low-gap", `${MINUS}${span === 1 ? 1 : three(span)} more weight`); end("end-gap", `more contribution ${span === 1 ? 1 : three(span)}`);
    end("low-effect", `${MINUS}${three(effectTop)} hurt`); end("end-effect", `helped ${three(effectTop)} ${data.unit}`);
    const cell = (anchors, value) => (x) => !seen(x) ? null : !shown(x) ? SET_ASIDE : value ? colour(anchors, value(x)) : null;
    paint("map-weight", nKeys, nQueries, cell(VIRIDIS, (x) => w(x) / top));
    paint("map-written", nKeys, nQueries, cell(VIRIDIS, c && ((x) => c(x) / top)));
    paint("map-gap", nKeys, nQueries, cell(PUOR, gap && ((x) => (gap(x) / span + 1) / 2)));
    // without first-order effects only the target's row is known
    paint("map-effect", nKeys, nQueries, (x) => e && (data.firstOrder || exactRow(Math.floor(x / nKeys))) ? cell(PUOR, (y) => (e(y) / effectTop + 1) / 2)(x) : null);
  };
  const drawOverview = () => {
    if (!byId("block")) return;
    const packed = data.layers[shownLayer];
    byId("block").textContent = packed.block;
    const side = Math.ceil(data.tokens / packed.block), area = side * side;
    for (const map of ["pooledWeight", "pooledWritten"]) {
      const value = layer[map];
      const of = value && ((c) => { if (head >= 0) return value(head * area + c); let sum = 0; for (let h = 0; h < layer.heads; h++) sum += value(h * area + c); return sum / layer.heads; });
      paint(`map-${map}`, side, side, (c) => of && of(c) > 0 ? colour(VIRIDIS, of(c)) : null);
    }
    const body = byId("strongest").tBodies[0];
    const token = (place) => `${data.names[place]} (${place})`;
    const pairs = (packed.strongest || []).filter((pair) => head < 0 || pair[0] === head).sort((a, b) => Math.max(b[3], b[4] || 0) - Math.max(a[3], a[4] || 0)).slice(0, 16);
    body.replaceChildren(...pairs.map(([h, q, k, w, c]) => make("tr", {}, make("th", { scope: "row", textContent: (head < 0 ? `H${h} ` : "") + token(q) }), make("td", { className: "text", textContent: token(k) }), make("td", { textContent: three(w) }), make("td", { textContent: c === null ? "\u2013" : three(c) }))));
  };

  // ------------------------------------------------------------------ tokens
  const found = () => { const text = byId("find").value.trim().toLowerCase(); return text ? data.keyTokens.map((t, j) => (t.toLowerCase().includes(text) ? j : -1)).filter((j) => j >= 0) : []; };
  const legend = (parts) => byId("legend").replaceChildren(...parts.map(([mark, text]) => make("span", {}, ...(mark ? [make("i", { className: mark })] : []), text)));
  const drawTokens = () => {
    const q = query(), { w, c, e, total } = read(), row = byId("row"), together = head >= 0 && layer.together, matches = new Set(found());
    const picked = data.rows[Number(method)];
    const value = (j) => (picked.values[data.keys[j]] ?? null);
    const visibleKeys = data.keys.map((_, j) => j).filter((j) => !(aside() && sinks.has(j)));
    const top = method === "row" ? (aside() ? Math.max(...visibleKeys.map((j) => Math.max(w(q * nKeys + j), c ? c(q * nKeys + j) : 0)), 1e-12) : 1) : Math.max(...visibleKeys.map((j) => Math.abs(value(j) ?? 0)), 1e-12);
    if (method === "row") legend([["w", "weight"], ["c", "share of what the head writes"], ["t", "share of what the layer writes"], ["", "underlined: the query"], ["", `full height: ${top === 1 ? 1 : three(top)}`]]);
    else legend(picked.signed ? [["p", "helped the target"], ["n", "hurt it"], ["", `full height: ${three(top)} ${picked.unit}`]] : [["w", picked.name], ["", `full height: ${three(top)} ${picked.unit}`]]);
    let weight = 0;
    row.replaceChildren(...data.keys.map((place, j) => {
      const cell = q * nKeys + j, bars = make("span", { className: "bars" }), hide = aside() && sinks.has(j);
      bars.setAttribute("aria-hidden", "true");
      const bar = (kind, x) => { const i = make("i", { className: kind }); i.style.height = `${100 * Math.min(x, 1)}%`; bars.append(i); };
      let words;
      weight += w(cell);
      if (method === "row") {
        if (!hide) { bar("w", w(cell) / top); if (c) bar(head < 0 ? "t" : "c", c(cell) / top); if (together) bar("t", together(cell) / top); }
        words = `weight ${three(w(cell))}${c ? `, contribution ${three(c(cell))}` : ""}`;
      } else {
        const x = value(j), verdict = picked.verdicts && picked.verdicts[place];
        if (!hide && x !== null) bar(picked.signed ? (x < 0 ? "n" : "p") : "w", Math.abs(x) / top);
        words = `${picked.name} ${x === null ? "undefined" : `${three(x)} ${picked.unit}`}${verdict ? `, verdict ${verdict.replace("_", " ")}` : ""}`;
      }
      const press = make("button", { type: "button", title: `${place}: ${words}` }, bars, make("bdi", { textContent: data.keyTokens[j] }));
      if (place === data.queries[q]) press.classList.add("query"); else if (place > data.queries[q]) press.classList.add("after");
      if (matches.has(j)) press.classList.add("found");
      press.setAttribute("aria-label", `${data.keyTokens[j]}, ${press.title}`);
      const say = () => { if (method === "row") tell(q, j); else byId("where").textContent = `${key(j)}: ${words}`; };
      press.addEventListener("focus", say); press.addEventListener("mouseenter", say);
      press.addEventListener("click", () => { const at = data.queries.indexOf(place); if (at >= 0) { queryBox.value = at; drawRow(); const again = row.children[j].firstChild; again.focus(); } else say(); });
      return make("li", {}, press);
    }));
    const rest = 1 - weight, outside = rest > 0.02 ? `; ${three(rest)} of the weight is on no key shown here` : "";
    byId("where").textContent = `${name()}, query ${data.queryTokens[q]} (${data.queries[q]})` + (total ? `: ${head < 0 ? "the layer" : "the head"} writes ${total(q).toPrecision(3)} (residual norm, summed over keys)` : "") + outside;
  };
  const drawSide = () => {
    const q = query(), { w, c, e } = read(), at = (f) => data.keys.map((_, j) => (f && seen(q * nKeys + j) ? f(q * nKeys + j) : null));
    const own = [{ name: `${name()} weight`, unit: "mass", signed: false, row: at(w) }];
    if (c) own.push({ name: `${name()} contribution`, unit: "share", signed: false, row: at(c) });
    if (e && (data.firstOrder || exactRow(q))) own.push({ name: `${name()} effect`, unit: data.unit, signed: true, row: at(e) });
    const rows = [...data.rows.map((r) => ({ ...r, row: data.keys.map((k) => r.values[k] ?? null) })), ...own.map((r) => ({ ...r, own: true }))];
    const matches = new Set(found());
    const body = rows.map((r) => {
      const known = r.row.filter((x, j) => x !== null && !(aside() && sinks.has(j))), top = Math.max(...known.map(Math.abs), 1e-12);
      const title = make("th", { scope: "row", textContent: r.name, title: `${r.name}, ${r.unit}` });
      return make("tr", { className: r.own ? "own" : "" }, title, ...r.row.map((x, j) => {
        const cell = make("td");
        if (x === null) { cell.textContent = "\u2013"; return cell; }
        const hide = aside() && sinks.has(j), rgb = hide ? SET_ASIDE : r.signed ? colour(PUOR, (x / top + 1) / 2) : colour(VIRIDIS, Math.abs(x) / top);
        const light = (0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]) / 255;
        cell.style.background = `rgb(${rgb})`; cell.style.color = light > 0.52 ? "#111" : "#fff";
        const small = Math.abs(x) < 0.005 ? ".00" : x.toFixed(2).replace("-", MINUS).replace(/^(\u2212?)0\./, "$1.");
        cell.textContent = Math.abs(x) >= 9.95 ? x.toFixed(0).replace("-", MINUS) : small;
        const verdict = r.verdicts && r.verdicts[data.keys[j]];
        cell.title = `${key(j)}: ${three(x)} ${r.unit}${verdict ? `, ${verdict.replace("_", " ")}` : ""}`;
        if (verdict === "disagree") cell.className = "wrong";
        return cell;
      }));
    });
    const head_ = make("thead", {}, make("tr", {}, make("td"), ...data.keyTokens.map((t, j) => make("th", { scope: "col", textContent: t, className: matches.has(j) ? "found" : "" }))));
    byId("side").replaceChildren(head_, make("tbody", {}, ...body));
  };

  // ------------------------------------------------------------------ grid
  const LEFT = 30, TOP = 18;
  let place = [Number(layerBox.value), 0];
  const nHeads = Math.max(...data.layers.map((l) => l.heads));
  const tellGrid = () => {
    const stat = data.grid[Number(statBox.value)], row = stat.values[place[0]], x = row && row[place[1]];
    byId("grid-where").textContent = `L${data.layers[place[0]].label}H${place[1]}: ${stat.name} ${x === undefined || x === null ? "not measured" : three(x)} (${stat.unit}). Enter or a click chooses the head.`;
  };
  const drawGrid = () => {
    const stat = data.grid[Number(statBox.value)], size = Math.max(6, Math.min(20, Math.floor(620 / nHeads)));
    const canvas = byId("grid"), context = canvas.getContext("2d");
    canvas.width = LEFT + nHeads * size; canvas.height = TOP + data.layers.length * size;
    context.clearRect(0, 0, canvas.width, canvas.height);
    // every label that has room
    context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--muted");
    context.font = "11px system-ui, sans-serif"; context.textBaseline = "middle"; context.textAlign = "right";
    const everyLayer = Math.ceil(14 / size), everyHead = Math.ceil(20 / size);
    data.layers.forEach((l, i) => { if (i % everyLayer === 0) context.fillText(l.label.replace(" cross", "x"), LEFT - 4, TOP + (i + 0.5) * size); });
    context.textAlign = "center";
    for (let h = 0; h < nHeads; h += everyHead) context.fillText(h, LEFT + (h + 0.5) * size, TOP / 2);
    context.translate(LEFT, TOP);
    stat.values.forEach((row, l) => { for (let h = 0; h < data.layers[l].heads; h++) { context.fillStyle = row ? `rgb(${colour(VIRIDIS, row[h] / stat.top)})` : "#96969e"; context.fillRect(h * size, l * size, size - 1, size - 1); } });
    const ring = (l, h, stroke, inset) => { context.lineWidth = 2; context.strokeStyle = stroke; context.strokeRect(h * size + inset, l * size + inset, size - 1 - 2 * inset, size - 1 - 2 * inset); };
    if (head >= 0) { ring(shownLayer, head, "#ffffff", 1); ring(shownLayer, head, "#d55e00", 2.5); }
    if (document.activeElement === canvas) ring(place[0], place[1], "#ffffff", 1);
    context.setTransform(1, 0, 0, 1, 0, 0);
    byId("end-grid").textContent = `${stat.top === 1 ? 1 : three(stat.top)} (${stat.unit})`;
    canvas.dataset.size = size;
  };
  const chooseFromGrid = async () => { layerBox.value = place[0]; await chooseLayer(place[1]); drawGrid(); tellGrid(); };
  const grid = byId("grid");
  const gridAt = (event) => { const size = Number(grid.dataset.size), box = grid.getBoundingClientRect(), scale = grid.width / box.width; return [Math.min(Math.floor(((event.clientY - box.top) * scale - TOP) / size), data.layers.length - 1), Math.min(Math.floor(((event.clientX - box.left) * scale - LEFT) / size), nHeads - 1)].map((x) => Math.max(x, 0)); };
  grid.addEventListener("pointermove", (event) => { place = gridAt(event); tellGrid(); });
  grid.addEventListener("click", (event) => { place = gridAt(event); if (place[1] < data.layers[place[0]].heads) chooseFromGrid(); });
  grid.addEventListener("focus", () => { drawGrid(); tellGrid(); });
  grid.addEventListener("blur", drawGrid);
  grid.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (event.key === "Enter") { event.preventDefault(); chooseFromGrid(); }
    if (!step) return;
    event.preventDefault();
    const l = Math.min(Math.max(place[0] + step[0], 0), data.layers.length - 1);
    place = [l, Math.min(Math.max(place[1] + step[1], 0), data.layers[l].heads - 1)];
    drawGrid(); tellGrid();
  });

  // ------------------------------------------------------------------ choices
  const drawRow = () => { drawSide(); drawTokens(); };
  const redraw = () => { drawMaps(); drawOverview(); drawGrid(); drawRow(); };
  // a layer is unpacked while the reader goes on choosing: the latest wish counts, and nothing shown mixes two layers
  let wish = -1, asked = 0, settled = 0;
  const chooseLayer = async (wanted = wish) => {
    const mine = ++asked, index = Number(layerBox.value);
    wish = wanted;
    const found = await openLayer(index);
    if (mine !== asked) return;
    settled = mine;
    layer = found;
    shownLayer = index;
    headBox.replaceChildren();
    option(headBox, -1, "all (mean weight, layer's contribution)");
    for (let h = 0; h < layer.heads; h++) option(headBox, h, String(h));
    head = wish < layer.heads ? wish : -1;
    headBox.value = head;
    place = [index, Math.max(head, 0)];
    redraw();
    if (data.layers[index].note) byId("where").textContent = `layer ${data.layers[index].label}: ${data.layers[index].note}`;
    document.documentElement.dataset.ready = "yes";
  };
  const choice = (value, text, checked) => {
    const box = make("input", { type: "radio", name: "method", value, checked });
    box.addEventListener("change", () => { method = value; drawTokens(); });
    byId("switch").append(make("label", {}, box, make("bdi", { textContent: text })));
  };
  choice("row", "the chosen head's row", true);
  data.rows.forEach((row, i) => choice(String(i), row.name, false));
  layerBox.addEventListener("change", () => chooseLayer());
  headBox.addEventListener("change", () => {
    wish = Number(headBox.value);
    if (asked !== settled) return;
    head = wish;
    place = [shownLayer, Math.max(head, 0)];
    redraw();
  });
  queryBox.addEventListener("change", drawRow);
  document.documentElement.addEventListener("themechange", drawGrid);
  statBox.addEventListener("change", () => { drawGrid(); tellGrid(); });
  asideBox.addEventListener("change", redraw);
  let next = 0;
  byId("find").addEventListener("input", () => { next = 0; const count = found().length; byId("found").textContent = byId("find").value.trim() ? `${count} found` : ""; drawRow(); });
  byId("find").addEventListener("keydown", (event) => {
    const matches = found();
    if (event.key !== "Enter" || !matches.length) return;
    const j = matches[next++ % matches.length];
    byId("row").children[j].scrollIntoView({ block: "nearest" });
    tell(query(), j);
  });
  for (const id of ["map-weight", "map-written", "map-effect", "map-gap"]) {
    const canvas = byId(id);
    if (!canvas) continue;
    const at = (event) => {
      const box = canvas.getBoundingClientRect(), clip = (x, n) => Math.min(Math.max(Math.floor(x * n), 0), n - 1);
      return [clip((event.clientY - box.top) / box.height, nQueries), clip((event.clientX - box.left) / box.width, nKeys)];
    };
    let here = [nQueries - 1, 0];
    const choose = () => { queryBox.value = here[0]; drawRow(); tell(...here); };
    canvas.addEventListener("pointermove", (event) => tell(...(here = at(event))));
    canvas.addEventListener("click", (event) => { here = at(event); choose(); });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (event.key === "Enter") { event.preventDefault(); choose(); }
      if (!step) return;
      event.preventDefault();
      here = [Math.min(Math.max(here[0] + step[0], 0), nQueries - 1), Math.min(Math.max(here[1] + step[1], 0), nKeys - 1)];
      tell(...here);
    });
  }

  // ------------------------------------------------------------------ export
  const file = () => `attndiag-${name().replace(/\W+/g, "-")}`;
  const keep = (blob, title) => { const url = URL.createObjectURL(blob), link = make("a", { href: url, download: title }); document.body.append(link); link.click(); link.remove(); setTimeout(() => URL.revokeObjectURL(url), 1000); };
  byId("csv").addEventListener("click", () => {
    const { w, c, e } = read(), quoted = (text) => `"${text.replaceAll('"', '""')}"`;
    const lines = [`query,query_token,key,key_token,weight,contribution_share,effect,effect_unit,effect_is`];
    for (let x = 0; x < cells; x++) {
      if (!seen(x) || !shown(x)) continue;
      const q = Math.floor(x / nKeys), j = x % nKeys, known = e && (data.firstOrder || exactRow(q));
      lines.push([data.queries[q], quoted(data.queryTokens[q]), data.keys[j], quoted(data.keyTokens[j]), w(x).toPrecision(6), c ? c(x).toPrecision(6) : "", known ? e(x).toPrecision(6) : "", known ? data.unit : "", known ? (exactRow(q) ? "exact" : "first order") : ""].join(","));
    }
    keep(new Blob([lines.join("\n") + "\n"], { type: "text/csv" }), `${file()}.csv`);
  });
  for (const press of document.querySelectorAll("[data-png]")) press.addEventListener("click", () => {
    const source = byId(`map-${press.dataset.png}`), scale = Math.max(1, Math.floor(1024 / Math.max(source.width, source.height)));
    const canvas = make("canvas", { width: source.width * scale, height: source.height * scale + 28 }), context = canvas.getContext("2d");
    context.fillStyle = "#fff"; context.fillRect(0, 0, canvas.width, canvas.height);
    context.fillStyle = "#111"; context.font = "16px system-ui, sans-serif";
    context.fillText(`${name()} ${press.parentNode.querySelector("strong").textContent}`, 4, 19);
    context.imageSmoothingEnabled = false;
    context.drawImage(source, 0, 28, source.width * scale, source.height * scale);
    canvas.toBlob((blob) => keep(blob, `${file()}-${press.dataset.png}.png`), "image/png");
  });

  const stepBox = (box, by) => {
    const index = box.selectedIndex + by;
    if (index >= 0 && index < box.options.length) { box.selectedIndex = index; box.dispatchEvent(new Event("change")); }
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(SELECT|INPUT)$/.test(event.target.tagName)) return;
    const move = { ",": [layerBox, -1], ".": [layerBox, 1], "[": [headBox, -1], "]": [headBox, 1] }[event.key];
    if (move) { event.preventDefault(); stepBox(...move); }
  });
  await chooseLayer();
})();
