// The report page's script: fills Bokeh's figures with the chosen step, labels blocks that have room, and follows dark mode.
"use strict";
window.penstock = (() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const page = read("penstock-data");
  const styles = page.styles;
  const ARRAYS = { f8: Float64Array, i4: Int32Array, u1: Uint8Array };
  const MESSAGES = new Set(styles.messages);
  const ROWS = { top: 0.42, strip: 0.16, idle: 0.1 };
  const MAX_LABELS = 3000;
  const MERGED = 100;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const decoded = new Map();
  let shown = 0;

  function column(packed) {
    const text = atob(packed.data);
    const bytes = new Uint8Array(text.length);
    for (let n = 0; n < text.length; n++) bytes[n] = text.charCodeAt(n);
    return new ARRAYS[packed.type](bytes.buffer);
  }

  // Returns the columns of a timeline. The halves of a pair share the height of a block; messages have a strip below the ops.
  function blocks(packed) {
    const columns = {};
    for (const name of ["start", "end", "rank", "stage", "microbatch", "kind", "shade", "half"]) columns[name] = column(packed[name]);
    const count = columns.start.length;
    const top = new Float64Array(count), bottom = new Float64Array(count), length = new Float64Array(count);
    const fill = new Uint8Array(count);
    const low = packed.strip ? ROWS.top - ROWS.strip : ROWS.top;
    for (let n = 0; n < count; n++) {
      const message = MESSAGES.has(columns.kind[n]);
      const a = message ? low : -ROWS.top, b = message ? ROWS.top : low, middle = (a + b) / 2;
      top[n] = columns.rank[n] + (columns.half[n] === 2 ? middle : a);
      bottom[n] = columns.rank[n] + (columns.half[n] === 1 ? middle : b);
      length[n] = columns.end[n] - columns.start[n];
      fill[n] = 2 * columns.kind[n] + columns.shade[n];
    }
    const held = packed.held ? column(packed.held) : new Float64Array(count).fill(NaN);
    // Names of blocks in tooltips: of the kind, or of a half of a merged backward.
    const name = Float64Array.from(columns.kind);
    for (const n of column(packed.merged)) name[n] += MERGED;
    return { ...columns, name, top, bottom, length, fill, held, several: packed.several, usual: length.slice().sort()[count >> 1] ?? 0 };
  }

  function gaps(packed) {
    const columns = Object.fromEntries(Object.entries(packed).map(([name, values]) => [name, column(values)]));
    const offset = (by) => Float64Array.from(columns.rank, (rank) => rank + by);
    return { ...columns, top: offset(-ROWS.idle), bottom: offset(ROWS.idle), length: columns.end.map((end, n) => end - columns.start[n]) };
  }

  function step(index) {
    if (!decoded.has(index)) {
      const packed = page.steps[index];
      decoded.set(index, { measured: blocks(packed.blocks), planned: packed.planned ? blocks(packed.planned) : null });
    }
    return decoded.get(index);
  }

  const find = (name) => Bokeh.documents.map((doc) => doc.get_model_by_name(name)).find((model) => model) ?? null;
  const last = (values) => values.reduce((a, b) => Math.max(a, b), 0);

  function fill(name, columns) {
    const source = find(name);
    if (source) source.data = columns;
  }

  function window_of(range, start, end) {
    range.setv({ bounds: null });
    range.setv({ start, end, reset_start: start, reset_end: end, min_interval: Math.abs(end - start) * 1e-6 });
  }

  function show(index) {
    shown = index;
    const all = document.getElementById("step") && find("overview");
    if (all) {
      const tops = Array.from(all.data.step, (step, n) => (step === index ? all.data.top[n] : 0));
      fill("chosen", { step: [index], top: [last(tops)] });
    }
    const packed = page.steps[index], timelines = step(index);
    for (const [name, columns] of Object.entries(timelines)) {
      const data = columns ?? {};
      const names = ["start", "end", "top", "bottom", "fill", "stage", "microbatch", "rank", "length", "held"];
      fill(name, { ...Object.fromEntries(names.map((key) => [key, data[key] ?? []])), kind: data.name ?? [] });
    }
    const end = Math.max(last(timelines.measured.end), timelines.planned ? last(timelines.planned.end) : 0) || 1;
    const bars = find("bars-figure");
    window_of(find("measured-figure").x_range, 0, end * 1.005);
    window_of(find("measured-figure").y_range, packed.ranks - 0.5, -0.5);
    fill("bars", packed.bars);
    fill("measured-gaps", gaps(packed.gaps));
    if (packed.planned_gaps) fill("planned-gaps", gaps(packed.planned_gaps));
    if (bars) {
      window_of(bars.x_range, 0, last(packed.bars.right) || 1);
      window_of(bars.y_range, packed.ranks - 0.5, -0.5);
    }
    const most = (packed.memory?.measured ?? []).concat(packed.memory?.planned ?? []).map((curve) => last(column(curve.y)));
    const plot = find("memory-figure");
    if (plot) window_of(plot.y_range, 0, Math.max(packed.memory?.limit ?? 0, ...most) * 1.08 || 1);
    fill("limit", { y: packed.memory?.limit == null ? [] : [packed.memory.limit] });
    show_memory();
    for (const section of document.querySelectorAll("[data-steps]")) {
      section.hidden = !section.dataset.steps.split(" ").includes(String(index));
    }
    label();
  }

  // Zooms the timeline to a part of the step that begins at a share of the rest, and in which blocks have room for labels.
  function show_part(share) {
    const plot = find("measured-figure"), { usual, end } = step(shown).measured, all = last(end) * 1.005;
    const length = share === "" ? all : Math.min(all, (usual * plot.inner_width) / 24 || all);
    const start = Number(share) * (all - length);
    plot.x_range.setv({ start, end: start + length });
  }

  // Draws the part of the memory curves that is in sight.
  function show_memory() {
    const plot = find("memory-figure");
    if (!plot) return;
    const memory = page.steps[shown].memory ?? { ranks: [], measured: [], planned: [] };
    const { start, end } = plot.x_range, pixels = plot.inner_width || 1000;
    const colours = memory.ranks.map((rank) => page.ranks[dark.matches ? "dark" : "light"][rank]);
    const band = { xs: [], ys: [], rank: [], colour: [] };
    for (const [name, curves] of [["memory", memory.measured], ["memory-planned", memory.planned]]) {
      const lines = curves.map((curve) => memory_lines(column(curve.x), column(curve.y), start, end, pixels));
      lines.forEach((line, n) => {
        if (!line.band || name !== "memory") return;
        band.xs.push(line.band.xs);
        band.ys.push(line.band.ys);
        band.rank.push(memory.ranks[n]);
        band.colour.push(colours[n]);
      });
      const ranks = memory.ranks.slice(0, curves.length);
      fill(name, { xs: lines.map((line) => line.xs), ys: lines.map((line) => line.ys), rank: ranks, colour: colours.slice(0, curves.length) });
    }
    fill("memory-band", band);
    for (const swatch of document.querySelectorAll("[data-rank]")) {
      swatch.style.background = page.ranks[dark.matches ? "dark" : "light"][swatch.dataset.rank];
    }
  }

  // Labels the blocks that are in sight and wide enough.
  function label() {
    for (const name of ["measured", "planned"]) {
      const plot = find(`${name}-figure`), columns = step(shown)[name];
      if (!plot || !columns) { fill(`${name}-labels`, { x: [], y: [], text: [], colour: [] }); continue; }
      const { start, end } = plot.x_range, across = plot.inner_width / (end - start);
      // Blocks get edges only if they are wider than edges.
      find(`${name}-blocks`).glyph.line_alpha = across * columns.usual > 5 ? 1 : 0;
      const high = (plot.inner_height / Math.abs(plot.y_range.end - plot.y_range.start)) * 2 * ROWS.top;
      const x = [], y = [], text = [], colour = [];
      for (let n = 0; n < columns.start.length && high >= 11 && x.length < MAX_LABELS; n++) {
        const left = Math.max(columns.start[n], start), right = Math.min(columns.end[n], end);
        const room = (right - left) * across;
        if (room < 9 || MESSAGES.has(columns.kind[n]) || (columns.half[n] && high < 24)) continue;
        const text_that_fits = labels_of(columns, n).find((label) => label.length * 6.6 + 2 <= room);
        if (text_that_fits === undefined) continue;
        x.push((left + right) / 2);
        y.push((columns.top[n] + columns.bottom[n]) / 2);
        text.push(text_that_fits);
        colour.push(columns.shade[n] ? "#000000" : "#ffffff");
      }
      fill(`${name}-labels`, { x, y, text, colour });
    }
  }

  function labels_of(columns, n) {
    const letter = styles.kinds[columns.kind[n]].letter, number = columns.microbatch[n];
    if (number < 0) return [letter];
    const all = [`${letter}${number}`, `${number}`];
    return columns.several ? [`${columns.stage[n]}${letter}${number}`, ...all] : all;
  }

  const number = (value) => String(Number(value.toPrecision(9)));
  const time = (value) => (page.unit ? `${number(value)} ${page.unit}` : number(value));

  function amount(value) {
    if (page.held !== "bytes") return `${number(value)}`;
    const sizes = ["B", "KiB", "MiB", "GiB", "TiB"];
    let size = 0;
    while (Math.abs(value) >= 1024 && size < sizes.length - 1) { value /= 1024; size++; }
    return `${Number(value.toPrecision(4))} ${sizes[size]}`;
  }

  // Returns the text of a column's value in a tooltip.
  function describe(name, value) {
    if (name === "kind") return value < MERGED ? styles.kinds[value].meaning : styles.merged[value - MERGED];
    if (name === "cause") return styles.causes[value].meaning;
    if (name === "share") return `${(100 * value).toFixed(2)}%`;
    if (name === "stage" || name === "microbatch") return value < 0 ? "" : `${name} ${value}`;
    if (name !== "held") return time(value);
    if (Number.isNaN(value)) return "";
    return page.held === "bytes" ? `then ${amount(value)} held (${value.toLocaleString("en")} B)` : `then ${value} activations held`;
  }

  function follow_scheme() {
    const style = getComputedStyle(document.documentElement);
    const text = style.getPropertyValue("--text").trim(), line = style.getPropertyValue("--line").trim();
    for (const name of page.figures) {
      const plot = find(name);
      if (!plot) continue;
      const blocks = name.endsWith("-figure") ? find(name.replace("figure", "blocks")) : null;
      if (blocks) blocks.glyph.line_color = style.getPropertyValue("--back").trim();
      for (const axis of [...plot.below, ...plot.left]) {
        axis.setv({ axis_label_text_color: text, major_label_text_color: text, axis_line_color: line, major_tick_line_color: line });
      }
      for (const grid of plot.center) if ("grid_line_color" in grid.attributes) grid.grid_line_color = line;
      if (plot.title) plot.title.text_color = text;
    }
    show_memory();
  }

  // Bokeh would turn text into code here, which the page's policy forbids.
  function set_formatters() {
    Bokeh.Models.get("CustomJSHover").prototype.format = function (value) { return describe(this.name.replace("say-", ""), value); };
    Bokeh.Models.get("CustomJSTickFormatter").prototype.doFormat = (ticks) => ticks.map(amount);
  }

  async function begin() {
    set_formatters();
    for (const swatch of document.querySelectorAll("[data-colour]")) swatch.style.background = swatch.dataset.colour;
    for (const [place, item] of Object.entries(read("penstock-figures"))) {
      await Bokeh.embed.embed_item(item, place);
    }
    // Axes of a narrow page leave the room to the drawing.
    const left = window.innerWidth < 640 ? 44 : 70;
    for (const name of page.figures) find(name)?.setv({ min_border_left: left });
    const plot = find("measured-figure");
    let due = 0;
    const later = () => { clearTimeout(due); due = setTimeout(() => { label(); show_memory(); }, 60); };
    for (const range of [plot.x_range, plot.y_range]) range.change.connect(later);
    plot.properties.inner_width.change.connect(later);
    dark.addEventListener("change", follow_scheme);
    follow_scheme();
    const chosen = document.getElementById("step");
    chosen?.addEventListener("change", () => show(Number(chosen.value)));
    show(chosen ? Number(chosen.value) : 0);
    document.getElementById("part")?.addEventListener("change", (event) => show_part(event.target.value));
    const all = find("overview");
    all?.selected.change.connect(() => {
      const [bar] = all.selected.indices;
      if (bar === undefined || !chosen) return;
      chosen.value = String(all.data.step[bar]);
      show(all.data.step[bar]);
    });
    document.body.dataset.ready = "yes";
  }

  return { begin, show, step, find };
})();
window.penstock.drawn = window.penstock.begin();
