(() => {
  const root = document.documentElement, data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id), chinese = () => root.lang.startsWith("zh");
  const pick = (en, zh) => (chinese() ? zh : en);

  // ---- the formulas -------------------------------------------------------------------------------------------
  const dot = (a, b) => a[0] * b[0] + a[1] * b[1];
  const norm = (a) => Math.hypot(a[0], a[1]);
  const KEYS = [[1, 0], [0, 1]];

  // softmax over the keys that may be read; a row without any is all zero
  function softmax(scores) {
    const top = Math.max(...scores);
    if (top === -Infinity) return scores.map(() => 0);
    const powers = scores.map((s) => Math.exp(s - top)), total = powers.reduce((a, b) => a + b, 0);
    return powers.map((p) => p / total);
  }

  function twoItems({ q, values, temperature, copies, visible }) {
    const dots = KEYS.map((k) => dot(q, k));
    const scores = dots.map((d, j) => (visible[j] ? d / (Math.SQRT2 * temperature) : -Infinity));
    const each = softmax([...Array(copies).fill(scores[0]), scores[1]]);
    const weights = [each.slice(0, copies).reduce((a, b) => a + b, 0), each[copies]];
    const parts = weights.map((a, j) => values[j].map((v) => a * v));
    return { dots, scores, weights, parts, contributions: parts.map(norm), output: [0, 1].map((x) => parts[0][x] + parts[1][x]) };
  }

  const ALLOWED = {
    causal: (i, j) => j <= i, all: () => true, hidden_diagonal: (i, j) => j < i,
    one_step_leak: (i, j) => j <= i + 1, window_2: (i, j) => j <= i && i - j < 2,
  };
  const threePositions = (mask, own) => [0, 1, 2].map((i) =>
    softmax([0, 1, 2].map((j) => (ALLOWED[mask](i, j) ? (i === j ? own : 0) : -Infinity))));

  const SCORES = {
    dot: (q, k) => dot(q, k), scaled_dot: (q, k) => dot(q, k) / Math.SQRT2, general: (q, k) => dot(q, [k[1], k[0]]),
    additive: (q, k) => -2 * Math.tanh(q[0] + k[0]) - 2 * Math.tanh(q[1] + k[1]),
  };
  const scoring = (name, c) => { const s = KEYS.map((k) => SCORES[name]([c, 0], k)); return [s, softmax(s)]; };

  // ---- numbers and drawings -----------------------------------------------------------------------------------
  function text(x, digits = 4) {
    if (x === -Infinity) return "−∞";
    const plain = x.toFixed(digits);
    return (Number(plain) === 0 ? plain.replace("-", "") : plain.replace("-", "−"));
  }
  const vector = (v, digits = 4) => `[${v.map((x) => text(x, digits)).join(", ")}]`;
  const short = (x) => text(x, 2).replace(/\.?0+$/, "");
  function show(id, value, written) {
    const cell = at(id);
    cell.textContent = written ?? (Array.isArray(value) ? vector(value) : text(value));
    cell.dataset.value = JSON.stringify(value, (_, x) => (x === -Infinity ? "-inf" : x));
  }
  const colour = (name) => `var(--${name})`;
  const NS = "http://www.w3.org/2000/svg";
  function add(parent, tag, attributes, content) {
    const node = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (content !== undefined) node.textContent = content;
    parent.append(node);
    return node;
  }
  // a drawing as wide as its place, so that its letters keep their size on a small screen
  function wide(id, height) {
    const svg = at(id), width = Math.max(300, Math.min(900, svg.parentElement.clientWidth || 760));
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    return [svg, width];
  }
  function label(svg, x, y, base, index, attributes = {}) {
    const node = add(svg, "text", { x, y, class: "halo", "text-anchor": "middle", "dominant-baseline": "central", ...attributes }, base);
    if (index) add(node, "tspan", { dy: 4, "font-size": 10 }, index);
  }
  function arrow(svg, from, to, { stroke, width = 3, opacity = 1, dash }) {
    const length = Math.hypot(to[0] - from[0], to[1] - from[1]);
    if (length < 0.5) { add(svg, "circle", { cx: to[0], cy: to[1], r: width, fill: stroke, opacity }); return; }
    const u = [(to[0] - from[0]) / length, (to[1] - from[1]) / length], head = Math.min(5 + 2.4 * width, length);
    const neck = [to[0] - head * 0.8 * u[0], to[1] - head * 0.8 * u[1]], half = head * 0.42;
    const group = add(svg, "g", { opacity });
    add(group, "line", { x1: from[0], y1: from[1], x2: neck[0], y2: neck[1], stroke, "stroke-width": width, ...(dash ? { "stroke-dasharray": dash } : {}) });
    const back = [to[0] - head * u[0], to[1] - head * u[1]];
    add(group, "polygon", { fill: stroke, points: [to, [back[0] - half * u[1], back[1] + half * u[0]], [back[0] + half * u[1], back[1] - half * u[0]]].map((p) => p.map((x) => x.toFixed(2)).join(",")).join(" ") });
  }
  function plane(svg, reach, step) {
    svg.replaceChildren();
    const unit = 178 / reach, px = ([x, y]) => [x * unit, -y * unit];
    for (let g = -Math.floor(reach / step) * step; g <= reach; g += step) {
      const axis = g === 0, style = { stroke: colour(axis ? "muted" : "rule"), "stroke-width": axis ? 1 : 0.7 };
      add(svg, "line", { x1: g * unit, x2: g * unit, y1: -178, y2: 178, ...style });
      add(svg, "line", { y1: -g * unit, y2: -g * unit, x1: -178, x2: 178, ...style });
      if (!axis) {
        add(svg, "text", { x: g * unit, y: 13, class: "faint halo", "text-anchor": "middle" }, short(g));
        add(svg, "text", { x: -6, y: -g * unit + 4, class: "faint halo", "text-anchor": "end" }, short(g));
      }
    }
    return px;
  }
  // beside the tip of an arrow, away from where it came from
  function beyond(from, to, distance = 15) {
    const length = Math.hypot(to[0] - from[0], to[1] - from[1]);
    const u = length < 0.5 ? [0.7, 0.7] : [(to[0] - from[0]) / length, (to[1] - from[1]) / length];
    return [to[0] + distance * u[0], to[1] + distance * u[1]].map((x) => Math.max(-180, Math.min(180, x)));
  }

  // ---- example 1 ----------------------------------------------------------------------------------------------
  const NUMBERS = ["q1", "q2", "temperature", "copies", "v11", "v12", "v21", "v22", "own", "length"];
  const value = (id) => Number(at(id).value);
  const START = { q1: 1, q2: 0, temperature: 1, copies: 1, v11: 2, v12: 0, v21: 0, v22: 4, see1: true, see2: true };
  const PRESETS = {
    first: {}, zero: { q1: 0 }, second: { q1: 0, q2: 1 }, sink: { q1: 3, v11: 0.1, v12: 0.1 }, copies: { copies: 4 },
    none: { see1: false, see2: false },
  };
  const settings = (name) => ({ ...START, ...PRESETS[name] });
  const current = (id) => (typeof START[id] === "boolean" ? at(id).checked : value(id));

  function drawTwo() {
    const values = [[value("v11"), value("v12")], [value("v21"), value("v22")]], visible = [at("see1").checked, at("see2").checked];
    const q = [value("q1"), value("q2")], copies = value("copies");
    const r = twoItems({ q, values, temperature: value("temperature"), copies, visible });
    const written = r.contributions[0] + r.contributions[1];
    [0, 1].forEach((j) => {
      const n = j + 1;
      show(`dot${n}`, r.dots[j]); show(`score${n}`, r.scores[j]); show(`weight${n}`, r.weights[j]);
      show(`value${n}`, values[j], vector(values[j], 1)); show(`part${n}`, r.parts[j]); show(`contribution${n}`, r.contributions[j]);
      const share = written > 0 ? r.contributions[j] / written : 0;
      at(`bar-w${n}`).style.width = `${100 * r.weights[j]}%`; at(`bar-c${n}`).style.width = `${100 * share}%`;
      show(`bar-w${n}-shown`, r.weights[j], `${text(100 * r.weights[j], 1)} %`);
      show(`bar-c${n}-shown`, share, written > 0 ? `${text(100 * share, 1)} %` : "–");
    });
    at("times1").textContent = copies > 1 ? ` × ${copies}` : "";
    show("weights", r.weights[0] + r.weights[1]); show("output", r.output); show("norm", norm(r.output));

    const keys = at("key-plane"), near1 = Math.max(...q.map(Math.abs)) <= 1.3;
    const kp = plane(keys, near1 ? 1.65 : 3.3, near1 ? 0.5 : 1);
    arrow(keys, [0, 0], kp(q), { stroke: colour("ink"), width: 6.5 });
    KEYS.forEach((k, j) => arrow(keys, [0, 0], kp(k), { stroke: colour(j ? "two-fill" : "one-fill"), opacity: visible[j] ? 1 : 0.3, width: 2.6, dash: visible[j] ? undefined : "3 3" }));
    const covered = [q[0] > 1.05 && Math.abs(q[1]) < 0.4, q[1] > 1.05 && Math.abs(q[0]) < 0.4];
    const [right, up] = KEYS.map((k) => beyond([0, 0], kp(k), 16));
    label(keys, right[0], right[1] - (covered[0] ? 17 : 0), "k", "1", { style: `fill:${colour("one")}` });
    label(keys, up[0] + (covered[1] ? 17 : 0), up[1], "k", "2", { style: `fill:${colour("two")}` });
    const far = beyond([0, 0], kp(q), 14), near = KEYS.some((k) => Math.hypot(q[0] - k[0], q[1] - k[1]) < 0.35);
    label(keys, far[0] - (near ? 14 : 0), far[1] - (near ? 15 : 0), "q", "", { "font-weight": 700 });
    keys.setAttribute("aria-label", pick(`query ${vector(q, 1)}, keys [1, 0] and [0, 1]`, `查询 ${vector(q, 1)}，键 [1, 0] 与 [0, 1]`));

    const out = at("value-plane"), vp = plane(out, 4.5, 1), first = vp(r.parts[0]), end = vp(r.output);
    values.forEach((v, j) => { arrow(out, [0, 0], vp(v), { stroke: colour(j ? "two-fill" : "one-fill"), opacity: 0.65, width: 1.6, dash: "5 4" }); });
    arrow(out, [0, 0], first, { stroke: colour("one-fill"), width: 3.6 });
    arrow(out, first, end, { stroke: colour("two-fill"), width: 3.6 });
    arrow(out, [0, 0], end, { stroke: colour("ink"), width: 2.6 });
    label(out, ...beyond([0, 0], vp(values[0])), "v", "1", { style: `fill:${colour("one")}` });
    label(out, ...beyond([0, 0], vp(values[1])), "v", "2", { style: `fill:${colour("two")}` });
    if (norm(r.output) > 0) { const tip = beyond([0, 0], end, 13); label(out, tip[0] + 8, tip[1], "o", "", { "font-weight": 700 }); }
    out.setAttribute("aria-label", pick(`item 1 writes ${vector(r.parts[0], 2)}, item 2 writes ${vector(r.parts[1], 2)}, the output is ${vector(r.output, 2)}`,
      `条目 1 写入 ${vector(r.parts[0], 2)}，条目 2 写入 ${vector(r.parts[1], 2)}，输出为 ${vector(r.output, 2)}`));

    at("two-said").textContent = saidTwo(r, copies);
    for (const button of document.querySelectorAll("[data-preset]")) {
      const wanted = settings(button.dataset.preset);
      button.setAttribute("aria-pressed", Object.keys(wanted).every((id) => current(id) === wanted[id]));
    }
  }
  function saidTwo({ weights, contributions, output }, copies) {
    if (weights[0] + weights[1] === 0) return pick("The mask leaves nothing to read: all weights are 0 and so is the output. Frameworks differ here; see example 4.", "掩码没有留下任何可读的键：权重全为 0，输出也为 0。各框架对此处理不同，见例 4。");
    const w = weights[0] >= weights[1] ? 0 : 1, c = contributions[0] >= contributions[1] ? 0 : 1, n = (x) => text(x, 3);
    const even = Math.abs(weights[0] - weights[1]) < 1e-9, level = Math.abs(contributions[0] - contributions[1]) < 1e-9;
    const end = pick(` The output is ${vector(output, 3)}.`, `输出为 ${vector(output, 3)}。`);
    const many = copies > 1 ? pick(` The ${copies} copies of item 1 count together; the query did not change, yet item 2 lost weight.`, `条目 1 的 ${copies} 份合并计算；查询没有变，条目 2 的权重却减少了。`) : "";
    if (even && level) return pick(`Both items have weight ${n(weights[0])} and write equally much.`, `两个条目的权重都是 ${n(weights[0])}，写入的也一样多。`) + many + end;
    if (even) return pick(`The weights are even, but item ${c + 1} writes more: ${n(contributions[c])} against ${n(contributions[1 - c])}.`, `权重相等，但条目 ${c + 1} 写入得更多：${n(contributions[c])} 对 ${n(contributions[1 - c])}。`) + many + end;
    if (level) return pick(`Item ${w + 1} has the larger weight, ${n(weights[w])}, and both write equally much.`, `条目 ${w + 1} 的权重更大，为 ${n(weights[w])}，而两者写入的一样多。`) + many + end;
    if (w === c) return pick(`Item ${w + 1} has the larger weight, ${n(weights[w])}, and writes more: ${n(contributions[c])} against ${n(contributions[1 - c])}.`, `条目 ${w + 1} 的权重更大，为 ${n(weights[w])}，写入的也更多：${n(contributions[c])} 对 ${n(contributions[1 - c])}。`) + many + end;
    return pick(`Item ${w + 1} has the larger weight, ${n(weights[w])}, yet item ${c + 1} writes more: ${n(contributions[c])} against ${n(contributions[1 - c])}. The weight alone would mislead.`, `条目 ${w + 1} 的权重更大，为 ${n(weights[w])}，写入更多的却是条目 ${c + 1}：${n(contributions[c])} 对 ${n(contributions[1 - c])}。只看权重就会误判。`) + many + end;
  }

  // ---- example 2 ----------------------------------------------------------------------------------------------
  const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;
  const SAID_THREE = {
    causal: ["No query reads the future. With equal scores the rows are [1, 0, 0], [½, ½, 0] and [⅓, ⅓, ⅓].", "没有查询读到未来。得分相等时，各行为 [1, 0, 0]、[½, ½, 0]、[⅓, ⅓, ⅓]。"],
    window_2: ["Each query reads itself and one key before it. What lies further back can arrive only through another layer.", "每个查询读自己和前一个键。更早的内容只能通过另一层传来。"],
    all: ["Every query reads everything, as in an encoder. A model that predicts the next token would read its own answer.", "每个查询都读全部内容，编码器就是这样。若用来预测下一个词元，模型就会读到答案。"],
    hidden_diagonal: ["No query reads itself, and the first has nothing to read at all: its row is empty (example 4). The model still trains; it is only worse than it should be.", "查询读不到自己，第一个查询更是无键可读，整行为空（见例 4）。模型照样能训练，只是比应有的差。"],
    one_step_leak: ["Queries 1 and 2 read the very token that they have to predict. The training loss falls towards 0 and looks wonderful; generating text, the model knows nothing.", "查询 1 和 2 读到了它们要预测的那个词元。训练损失降向 0，看上去很漂亮；真正生成文本时，模型却一无所知。"],
  };
  function drawThree() {
    const mask = chosen("mask"), rows = threePositions(mask, value("own"));
    rows.forEach((row, i) => row.forEach((a, j) => {
      const cell = at(`a${i + 1}${j + 1}`), open = ALLOWED[mask](i, j);
      cell.className = open ? "" : "no";
      cell.style.background = open ? `color-mix(in srgb, var(--weight) ${(a * 78).toFixed(1)}%, transparent)` : "";
      cell.firstChild.textContent = text(a, 3);
      cell.dataset.value = a;
    }));
    at("three-said").textContent = pick(...SAID_THREE[mask]);
  }

  // ---- example 3 ----------------------------------------------------------------------------------------------
  function drawScale() {
    const s = data.spreads[Number(chosen("width"))], [svg, W] = wide("histogram", 250);
    const left = 44, right = W - 12, base = 214, top = 14, reach = 40, x = (v) => left + ((v + reach) / (2 * reach)) * (right - left);
    const share = (counts) => counts.map((c) => c / s.draws), raw = share(s.counts), scaled = share(s.scaled_counts);
    const peak = Math.ceil(Math.max(...raw, ...scaled) * 20) / 20, y = (v) => base - (v / peak) * (base - top);
    for (let g = 0; g <= peak + 1e-9; g += 0.1) {
      add(svg, "line", { x1: left, x2: right, y1: y(g), y2: y(g), stroke: colour("rule"), "stroke-width": 0.7 });
      add(svg, "text", { x: left - 7, y: y(g) + 4, class: "faint", "text-anchor": "end" }, `${Math.round(100 * g)} %`);
    }
    for (let g = -40; g <= 40; g += W < 500 ? 20 : 10) add(svg, "text", { x: x(g), y: base + 18, class: "faint", "text-anchor": "middle" }, short(g));
    const width = x(1) - x(0);
    raw.forEach((v, b) => { if (v) add(svg, "rect", { x: x(b - reach) + 0.5, y: y(v), width: width - 1, height: base - y(v), fill: colour("contribution-fill"), opacity: 0.85 }); });
    scaled.forEach((v, b) => { if (v) add(svg, "rect", { x: x(b - reach) + 0.5, y: y(v), width: width - 1, height: base - y(v), fill: colour("weight"), opacity: 0.55, stroke: colour("weight") }); });
    add(svg, "line", { x1: left, x2: right, y1: base, y2: base, stroke: colour("muted") });
    add(svg, "text", { x: (left + right) / 2, y: base + 34, class: "faint", "text-anchor": "middle" }, pick("score", "得分"));
    const n = (v, d) => text(v, d);
    svg.setAttribute("aria-label", pick(`histogram of scores at width ${s.d_k}: standard deviation ${n(s.sd, 2)} before and ${n(Math.sqrt(s.scaled_variance), 2)} after division`, `宽度 ${s.d_k} 时得分的直方图：除之前标准差 ${n(s.sd, 2)}，除之后 ${n(Math.sqrt(s.scaled_variance), 2)}`));
    at("scale-said").textContent = pick(
      `At d = ${s.d_k} the products have variance ${n(s.variance, 1)}; divided by √${s.d_k} = ${n(Math.sqrt(s.d_k), 2)} they have ${n(s.scaled_variance, 3)}. Among 16 keys the largest takes ${n(100 * s.largest, 0)} % of the weight without the division and ${n(100 * s.scaled_largest, 0)} % with it.`,
      `d = ${s.d_k} 时，点积的方差为 ${n(s.variance, 1)}；除以 √${s.d_k} = ${n(Math.sqrt(s.d_k), 2)} 之后为 ${n(s.scaled_variance, 3)}。在 16 个键中，不除时最大的键平均占去 ${n(100 * s.largest, 0)} % 的权重，除之后只占 ${n(100 * s.scaled_largest, 0)} %。`);
    at("scale-said").dataset.value = s.variance;
  }

  // ---- example 5 ----------------------------------------------------------------------------------------------
  function drawShared() {
    const kv = Number(chosen("kv")), H = 8, group = H / kv, d = 64, bytes = 2 * kv * d * 2, [svg, W] = wide("sharing", 184);
    const gap = W < 500 ? 6 : 12, box = Math.min(84, (W - 4 - 7 * gap) / 8), start = (W - H * box - (H - 1) * gap) / 2, mid = (h) => start + h * (box + gap) + box / 2;
    const tones = ["weight", "contribution-fill", "one-fill", "two-fill"];
    for (let g = 0; g < kv; g++) {
      const from = mid(g * group), to = mid(g * group + group - 1), centre = (from + to) / 2, tone = colour(tones[g % 4]);
      for (let h = g * group; h < (g + 1) * group; h++) add(svg, "line", { x1: mid(h), y1: 46, x2: centre, y2: 130, stroke: tone, "stroke-width": 2.2 });
      const span = Math.max(box, Math.min(to - from + box, 150));
      add(svg, "rect", { x: centre - span / 2, y: 130, width: span, height: 42, rx: 7, fill: colour("panel"), stroke: tone, "stroke-width": 2.2 });
      add(svg, "text", { x: centre, y: 156, "text-anchor": "middle" }, span > 98 ? pick(`keys, values ${g}`, `键与值 ${g}`) : box > 60 ? pick(`k, v ${g}`, `键值 ${g}`) : `${g}`);
    }
    for (let h = 0; h < H; h++) {
      add(svg, "rect", { x: mid(h) - box / 2, y: 10, width: box, height: 36, rx: 7, fill: colour("panel"), stroke: colour(tones[Math.floor(h / group) % 4]), "stroke-width": 1.4 });
      add(svg, "text", { x: mid(h), y: 33, "text-anchor": "middle" }, box > 60 ? pick(`query ${h}`, `查询 ${h}`) : `q${h}`);
    }
    const name = kv === 8 ? pick("Multi-head attention", "多头注意力") : kv === 1 ? pick("Multi-query attention", "多查询注意力") : pick("Grouped-query attention", "分组查询注意力");
    const map = [...Array(H).keys()].map((h) => Math.floor(h / group));
    svg.setAttribute("aria-label", pick(`key/value head of each query head: ${map.join(", ")}`, `各查询头所读的键值头：${map.join("、")}`));
    const mib = (32 * 8192 * bytes) / 2 ** 20;
    at("shared-said").textContent = pick(
      `${name}: ${kv} key/value head${kv > 1 ? "s" : ""} of width 64 cost 2 × ${kv} × 64 × 2 = ${bytes.toLocaleString("en")} bytes a token and layer in 16-bit numbers; 8,192 tokens in 32 layers take ${mib.toLocaleString("en")} MiB.`,
      `${name}：${kv} 个宽 64 的键值头，用 16 位数存放，每个词元每层占 2 × ${kv} × 64 × 2 = ${bytes.toLocaleString("en")} 字节；32 层、8,192 个词元共占 ${mib.toLocaleString("en")} MiB。`);
    at("shared-said").dataset.value = JSON.stringify({ map, bytes });
  }

  // ---- example 6 ----------------------------------------------------------------------------------------------
  const CURVES = [["dot", "weight", ""], ["scaled_dot", "contribution-fill", "9 4"], ["general", "two-fill", "2 4"], ["additive", "one-fill", "14 4 3 4"]];
  const NAMES = { dot: ["dot product", "点积"], scaled_dot: ["scaled", "缩放点积"], general: ["general", "一般形式"], additive: ["additive", "加性"] };
  function drawScoring() {
    const c = value("length"), [svg, W] = wide("curves", 260), end = W - 108;
    for (const name of Object.keys(SCORES)) {
      const [s, a] = scoring(name, c);
      show(`${name}-s1`, s[0]); show(`${name}-s2`, s[1]); show(`${name}-a1`, a[0]); show(`${name}-a2`, a[1]);
    }
    const x = (v) => 44 + (v / 8) * (end - 44), y = (v) => 216 - v * 200;
    for (const g of [0, 0.25, 0.5, 0.75, 1]) {
      add(svg, "line", { x1: x(0), x2: x(8), y1: y(g), y2: y(g), stroke: colour("rule"), "stroke-width": 0.7 });
      add(svg, "text", { x: x(0) - 7, y: y(g) + 4, class: "faint", "text-anchor": "end" }, short(g));
    }
    for (let g = 0; g <= 8; g += 2) add(svg, "text", { x: x(g), y: 234, class: "faint", "text-anchor": "middle" }, g);
    add(svg, "text", { x: x(4), y: 252, class: "faint", "text-anchor": "middle" }, pick("c, length of the query", "c，查询的长度"));
    add(svg, "line", { x1: x(c), x2: x(c), y1: y(0), y2: y(1), stroke: colour("ink"), "stroke-dasharray": "2 3" });
    const lifts = { dot: -7, scaled_dot: 9, general: 0, additive: 0 };
    for (const [name, tone, dash] of CURVES) {
      const points = [...Array(81).keys()].map((n) => `${x(n / 10).toFixed(1)},${y(scoring(name, n / 10)[1][0]).toFixed(1)}`).join(" ");
      add(svg, "polyline", { points, fill: "none", stroke: colour(tone), "stroke-width": 2.4, "stroke-dasharray": dash });
      const a = scoring(name, c)[1][0];
      add(svg, "circle", { cx: x(c), cy: y(a), r: 4.5, fill: colour(tone), stroke: colour("paper"), "stroke-width": 1.5 });
      add(svg, "text", { x: x(8) + 8, y: y(scoring(name, 8)[1][0]) + 4 + lifts[name] }, pick(...NAMES[name]));
    }
    svg.setAttribute("aria-label", pick("weight of the first key against the length of the query, ", "第一个键的权重随查询长度的变化，") + CURVES.map(([name]) => `${pick(...NAMES[name])} ${text(scoring(name, c)[1][0], 3)}`).join(pick(", ", "，")));
  }

  // ---- the page's arithmetic against attndiag's ------------------------------------------------------------------
  function check() {
    let worst = 0;
    const compare = (mine, theirs) => [mine, theirs].map((x) => x.flat(3)).reduce((a, b) => a.forEach((v, n) => { worst = Math.max(worst, Math.abs(v - b[n])); }));
    for (const known of data.known) {
      const r = twoItems({ q: known.q, values: [[2, 0], [0, 4]], temperature: 1, copies: 1, visible: [true, true] });
      compare([r.weights, r.output], [known.weights, known.output]);
    }
    for (const [mask, rows] of Object.entries(data.three)) compare(threePositions(mask, 0), rows);
    for (const [name, [s, a]] of Object.entries(data.scorings)) compare(scoring(name, 1), [s, a]);
    const fine = worst < 1e-9, line = at("check");
    line.dataset.worst = worst;
    line.classList.toggle("no", !fine);
    line.textContent = fine
      ? pick(`Checked in this browser: ${data.known.length} worked examples, ${Object.keys(data.three).length} masks and 4 scores agree with attndiag’s reference code; largest difference ${worst.toExponential(0)}.`, `已在此浏览器中核对：${data.known.length} 个算例、${Object.keys(data.three).length} 种掩码、4 种打分均与 attndiag 的参考实现一致，最大相差 ${worst.toExponential(0)}。`)
      : pick(`This browser’s numbers differ from attndiag’s by ${worst}: do not trust this page.`, `此浏览器算出的数与 attndiag 相差 ${worst}：请勿采信本页。`);
  }

  // ---- wiring -------------------------------------------------------------------------------------------------
  function draw() {
    for (const id of NUMBERS) {
      at(`${id}-shown`).textContent = short(value(id));
      at(id).setAttribute("aria-valuetext", short(value(id)));
    }
    drawTwo(); drawThree(); drawScale(); drawShared(); drawScoring(); check();
  }
  for (const input of document.querySelectorAll("input")) input.addEventListener("input", draw);
  for (const button of document.querySelectorAll("[data-preset]")) {
    button.addEventListener("click", () => {
      for (const [id, wanted] of Object.entries(settings(button.dataset.preset))) {
        if (typeof wanted === "boolean") at(id).checked = wanted; else at(id).value = wanted;
      }
      draw();
    });
  }
  function speak(language) {
    root.lang = language === "zh" ? "zh-CN" : "en";
    document.title = data.titles[language];
    for (const node of document.querySelectorAll("[data-en]")) node.setAttribute("aria-label", node.dataset[language]);
    draw();
  }
  at("language").addEventListener("click", () => speak(chinese() ? "en" : "zh"));
  const dark = () => root.dataset.theme === "dark" || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  at("theme").addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; });
  let size = 0;
  addEventListener("resize", () => { cancelAnimationFrame(size); size = requestAnimationFrame(draw); });
  draw();
  root.dataset.ready = "yes";
})();
