// Budgets: everything was worked out beforehand, so a move is a look into a table.
{
  const data = JSON.parse(document.getElementById("front").textContent);
  const find = (id) => document.getElementById(id);
  const slider = find("budget"), svg = find("curve"), status = find("copied");
  const radios = [...document.querySelectorAll("input[name=measure]")];
  const words = { params: "parameters", macs: "multiply-adds", bytes: "bytes" };
  let measure = "params", columns = data.measures.params, at = columns.chosen;

  const make = (parent, name, attributes = {}, text = "") => {
    const node = document.createElementNS(parent.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text) node.textContent = text;
    parent.append(node);
    return node;
  };
  const short = (value, unit = "") => {
    let prefix = 0;
    for (; Math.abs(value) >= 999.5 && prefix < 4; prefix++) value /= 1000;
    const digits = prefix && value < 99.95 ? String(Number(value.toPrecision(3))) : value.toFixed(0);
    return `${digits} ${["", "k", "M", "G", "T"][prefix]}${unit}`.trim();
  };
  const percent = (share) => `${Number((100 * share).toPrecision(3))} %`;
  const bytesAt = (at) => (columns.bytes ? columns.bytes[at] : data.before.bytes - (data.before.params - columns.params[at]) * data.width);
  const option = (index) => data.layers[index].options[columns.choices[at][index]];

  // One row for each layer that shares the budget; only its cells change.
  const rows = data.layers.map((layer) => {
    const row = find("choices").tBodies[0].insertRow();
    const name = make(row, "th", { scope: "row" });
    layer.name.split(/(?<=\.)/).forEach((part, index) => { if (index) make(name, "wbr"); name.append(part); });
    const what = make(row, "td"), size = make(row, "td", { class: "number" });
    const sizeBar = make(make(row, "td", { class: "wide" }), "i");
    const error = make(row, "td", { class: "number" });
    const errorBar = make(make(row, "td", { class: "wide" }), "i");
    return { row, what, size, sizeBar, error, errorBar };
  });
  const largest = Math.max(1, ...data.layers.map((layer) => data.plan.layers[layer.name].params[0]));
  const formats = [...new Set(data.layers.flatMap((layer) => layer.options.map(([method]) => method || "dense")))].sort();
  for (const name of formats) {
    const item = make(find("formats"), "li", { class: `f-${name}` });
    make(item, "span", { class: "key" });
    item.append(` ${name}`);
  }

  const planNow = () => {
    const plan = structuredClone(data.plan);
    // What was measured on the way to this model says nothing about another one.
    if (at !== columns.chosen && plan.notes) plan.notes = {};
    data.layers.forEach((layer, index) => {
      const [method, ranks, params, macs, error, bits, bytes] = option(index), entry = plan.layers[layer.name];
      entry.method = method || entry.method;
      entry.ranks = ranks;
      entry.bits = bits ?? null;
      entry.error = ranks ? error : null;
      entry.reason = ranks ? null : "the budget is best kept without it";
      entry.options = layer.settings[method] || {};
      entry.params = [entry.params[0], params];
      if (entry.macs) entry.macs = [entry.macs[0], macs];
      if (entry.bytes) entry.bytes = [entry.bytes[0], bytes];
    });
    return `${JSON.stringify(plan, null, 1)}\n`;
  };
  const commandNow = () => {
    const share = columns.share[at];
    const rounds = measure === "bytes" && data.bits;
    if (data.command) return `${data.command} --budget ${measure}=${share}${rounds ? ` --bits ${data.bits.join(",")}` : ""} --out small-${measure}-${share}/`;
    const kind = { params: "Params", macs: "Macs", bytes: "Bytes" }[measure];
    const norm = data.norm && data.norm !== "centred" ? `, norm="${data.norm}"` : "";
    return `plan = ts.plan(model, stats, budget=ts.${kind}(${share}${rounds ? `, bits=(${data.bits.join(", ")},)` : ""})${norm})\nsmall, report = ts.compress(model, plan, stats)`;
  };

  // The slider goes from plan to plan; a round share stands where it would be between its two neighbours.
  const placeOf = (share) => {
    const above = columns.share.findIndex((other) => other >= share - 1e-9);
    if (above < 0 || (above === 0 && columns.share[0] > share + 1e-9)) return null;
    if (above === 0) return 0;
    const low = columns.share[above - 1], high = columns.share[above];
    return (above - 1 + Math.min(1, (share - low) / (high - low))) / (columns.share.length - 1);
  };
  const drawScale = () => {
    const scale = find("scale"), taken = [], room = 46 / Math.max(scale.clientWidth, 1);
    scale.replaceChildren();
    // The first come first; those that would touch one of them are left out.
    for (const share of [1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.3, 0.7, 0.9, 0.4, 0.8, 0.6, 0.95, 0.85, 0.75, columns.share[0]]) {
      const place = placeOf(share);
      if (place === null || taken.some((other) => Math.abs(other - place) < room)) continue;
      taken.push(place);
      make(scale, "span", { "data-share": share }, percent(share)).style.setProperty("--at", place.toFixed(4));
    }
  };

  const draw = () => {
    const width = Math.max(280, svg.clientWidth || 640), height = 260;
    const left = 44, right = 24, top = 26, bottom = 42;
    const highest = Math.max(...columns.error, 1e-9);
    const step = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1].find((size) => highest / size <= 5) || 1;
    const x = (share) => left + share * (width - left - right);
    const y = (error) => height - bottom - (error / (step * Math.ceil(highest / step))) * (height - top - bottom);
    const of = (index) => columns[measure][index] / data.before[measure];
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    make(svg, "text", { x: 0, y: 12 }, "expected error");
    for (let error = 0; error <= highest + step * 0.999; error += step) {
      make(svg, "line", { class: "grid", x1: left, x2: width - right, y1: y(error), y2: y(error) });
      make(svg, "text", { x: left - 8, y: y(error) + 4, "text-anchor": "end" }, String(Number(error.toFixed(3))));
    }
    for (let tick = 0; tick <= 1.001; tick += width > 500 ? 0.1 : 0.25) {
      make(svg, "text", { x: x(tick), y: height - bottom + 18, "text-anchor": "middle" }, `${Math.round(100 * tick)} %`);
    }
    make(svg, "text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, `of the ${words[measure]} remain`);
    // A plan made for the other measure may lie above the front; the curve goes past it.
    const onFront = columns.share.map((_, index) => index).filter((index) =>
      index !== columns.chosen || !columns.error.some((error, other) => other !== index && of(other) <= of(index) && error < columns.error[index]));
    const line = onFront.map((index) => `${x(of(index)).toFixed(1)},${y(columns.error[index]).toFixed(1)}`);
    make(svg, "polygon", { class: "under", points: `${x(of(onFront[0]))},${y(0)} ${line.join(" ")} ${x(1)},${y(0)}` });
    make(svg, "polyline", { class: "front", points: line.join(" ") });
    for (const index of onFront) make(svg, "circle", { class: "stop", cx: x(of(index)), cy: y(columns.error[index]), r: 2 });
    const chosen = columns.chosen;
    make(svg, "circle", { class: "own", cx: x(of(chosen)), cy: y(columns.error[chosen]), r: 6 });
    const end = of(chosen) > 0.8;
    if (at === chosen) make(svg, "text", { class: "tag", x: x(of(chosen)) + (end ? -11 : 11), y: y(columns.error[chosen]) - 9, "text-anchor": end ? "end" : "start" }, "this model");
    make(svg, "line", { class: "drop", x1: x(of(at)), x2: x(of(at)), y1: y(columns.error[at]), y2: y(0) });
    make(svg, "circle", { class: "now", cx: x(of(at)), cy: y(columns.error[at]), r: 6 });
    svg.onclick = (event) => {
      const share = ((event.clientX - svg.getBoundingClientRect().left) * (width / svg.clientWidth) - left) / (width - left - right);
      const near = (index) => Math.abs(of(index) - share);
      at = columns.share.reduce((best, _, index) => (near(index) < near(best) ? index : best), 0);
      show();
    };
  };

  const show = () => {
    const chosen = columns.chosen;
    slider.max = columns.share.length - 1;
    slider.value = at;
    slider.style.setProperty("--at", at / Math.max(columns.share.length - 1, 1));
    slider.setAttribute("aria-valuetext", `${percent(columns.share[at])} of the ${words[measure]}${at === chosen ? ", this model" : ""}`);
    const params = columns.params[at], macs = columns.macs && columns.macs[at];
    const change = (now, before) => `${percent(now / before)} · ${(before / Math.max(now, 1)).toFixed(2)}×`;
    find("out-params").textContent = short(params);
    find("rel-params").textContent = change(params, data.before.params);
    find("out-macs").textContent = macs === null ? "–" : short(macs);
    find("rel-macs").textContent = macs === null || !data.before.macs ? "" : change(macs, data.before.macs);
    find("out-bytes").textContent = short(bytesAt(at), "B");
    find("rel-bytes").textContent = change(bytesAt(at), data.before.bytes);
    find("out-error").textContent = columns.error[at].toFixed(4);
    const more = columns.error[at] - columns.error[chosen];
    find("rel-error").textContent = at === chosen ? "this model" : `${more < 0 ? "−" : "+"}${Math.abs(more).toFixed(4)} against this model`;
    const worst = Math.max(1e-9, ...data.layers.map((_, index) => option(index)[4]));
    rows.forEach((cells, index) => {
      const [method, ranks, size, , error, bits] = option(index), layer = data.layers[index];
      const dense = !ranks, unchanged = columns.choices[chosen][index] === columns.choices[at][index];
      cells.row.className = `f-${method || "dense"}${dense ? " dense" : ""}${unchanged ? "" : " moved"}`;
      cells.what.replaceChildren();
      const format = make(cells.what, "span", { class: "format" });
      make(format, "span", { class: "key" });
      format.append(` ${method || "dense"}`);
      if (!dense) cells.what.append(` ${ranks.join(" × ")}`);
      if (bits) cells.what.append(` ${bits} bits`);
      cells.size.textContent = size.toLocaleString("en");
      cells.sizeBar.style.width = `${(100 * size) / largest}%`;
      cells.error.textContent = dense ? "" : error.toFixed(4);
      cells.errorBar.style.width = `${(100 * error) / worst}%`;
      cells.errorBar.hidden = dense;
      cells.row.title = `${layer.name}: ${data.plan.layers[layer.name].params[0].toLocaleString("en")} parameters before`;
    });
    find("command").textContent = commandNow();
    find("chosen").disabled = at === chosen;
    status.textContent = "";
    find("by-hand").hidden = true;
    drawScale();
    draw();
  };

  const copyByHand = (text) => {
    const area = find("by-hand");
    area.value = text;
    area.hidden = false;
    area.select();
    let done = false;
    try { done = document.execCommand("copy"); } catch { done = false; }
    area.hidden = done;
    return done;
  };
  const copy = async (text, what) => {
    let done = false;
    try { await navigator.clipboard.writeText(text); done = true; } catch { done = copyByHand(text); }
    status.textContent = done ? `${what} copied` : "Copy the text below";
  };

  slider.addEventListener("input", () => { at = Number(slider.value); show(); });
  for (const radio of radios) {
    radio.addEventListener("change", () => {
      const share = at === columns.chosen ? null : columns.share[at];
      measure = radio.value;
      columns = data.measures[measure];
      const gap = (index) => Math.abs(columns.share[index] - share);
      at = share === null ? columns.chosen : columns.share.reduce((best, _, index) => (gap(index) < gap(best) ? index : best), 0);
      show();
    });
  }
  find("chosen").addEventListener("click", () => { at = columns.chosen; show(); slider.focus(); });
  find("copy-command").addEventListener("click", () => copy(commandNow(), "Command"));
  find("copy-plan").addEventListener("click", () => copy(planNow(), "Plan"));
  find("save-plan").addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([planNow()], { type: "application/json" }));
    link.download = "plan.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    status.textContent = "plan.json saved";
  });

  document.querySelector("#explorer .live").hidden = false;
  if (!data.command) find("copy-command").textContent = "Copy Python";
  show();
  new ResizeObserver(draw).observe(svg);
  new ResizeObserver(drawScale).observe(slider);
}
