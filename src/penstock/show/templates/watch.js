// The watching page's script: asks the server for what is new, every second, and draws it.
"use strict";
window.penstock = (() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const page = read("penstock-data");
  const BY_RANK = new Set(["rss", "cuda_peak"]);
  const FROM_ZERO = new Set(["tokens_per_second", "step_seconds", "lr", "grad_norm", "bubble", "rss", "cuda_peak"]);
  const KINDS = { held_out_bits: "held_out" };
  const MAX_LINES = 32, GIB = 2 ** 30, PERIOD = 1000, PERIOD_HIDDEN = 5000;
  const LINE = "#3f7fc4";
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const element = (id) => document.getElementById(id);
  const find = (name) => Bokeh.documents.map((doc) => doc.get_model_by_name(name)).find((model) => model) ?? null;
  let rows = [], generation = -1, count = 0, drawn = null, lost = false;

  const text_of = (value) => (Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4))));
  const size = (bytes) => (bytes >= GIB ? `${(bytes / GIB).toFixed(2)} GiB` : `${Math.round(bytes / 2 ** 20)} MiB`);
  const ago = (seconds) => (seconds < 2 ? "now" : seconds < 120 ? `${Math.round(seconds)} s ago` : seconds < 7200 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`);
  const duration = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`);

  function last(name, kind = "train") {
    for (let n = rows.length - 1; n >= 0; n--) if (rows[n].kind === kind && name in rows[n]) return rows[n][name];
    return null;
  }

  function viridis(rank, ranks) {
    return `hsl(${Math.round(265 - (185 * rank) / Math.max(1, ranks - 1))} 55% ${dark.matches ? 62 : 42}%)`;
  }

  // Returns the lines of a chart: one, or for memory one per rank, of at most some ranks.
  function lines_of(name) {
    const own = rows.filter((row) => row.kind === (KINDS[name] ?? "train") && name in row);
    if (!own.length) return null;
    if (!BY_RANK.has(name)) {
      return { xs: [own.map((row) => row.step)], ys: [own.map((row) => row[name])], rank: [0], colour: [LINE] };
    }
    const ranks = Math.max(...own.map((row) => row[name].length));
    const shown = [...Array(ranks).keys()].filter((rank) => ranks <= MAX_LINES || rank % Math.ceil(ranks / MAX_LINES) === 0);
    const steps = own.map((row) => row.step);
    return {
      xs: shown.map(() => steps), ys: shown.map((rank) => own.map((row) => (row[name][rank] ?? NaN) / GIB)),
      rank: shown, colour: shown.map((rank) => viridis(rank, ranks)),
    };
  }

  // Returns the smallest and the largest of some numbers, with a margin.
  function limits_of(columns, margin) {
    let low = Infinity, high = -Infinity;
    for (const column of columns) for (const value of column) if (!Number.isNaN(value)) [low, high] = [Math.min(low, value), Math.max(high, value)];
    const room = (high - low || Math.abs(high) || 1) * margin;
    return [low - room, high + room];
  }

  function draw_charts() {
    for (const name of page.charts) {
      const lines = lines_of(name);
      element(`section-${name}`).hidden = lines === null;
      const source = find(name), plot = find(`${name}-figure`);
      if (lines === null || !source) continue;
      source.data = lines;
      const [left, right] = limits_of(lines.xs, 0.02), [low, high] = limits_of(lines.ys, 0.06);
      plot.x_range.setv({ start: left, end: right });
      plot.y_range.setv(FROM_ZERO.has(name) ? { start: 0, end: 1.05 * high } : { start: low, end: high });
    }
  }

  function card(value, name) {
    const box = document.createElement("div"), number = document.createElement("b"), text = document.createElement("span");
    number.textContent = value;
    text.textContent = name;
    box.append(number, text);
    return box;
  }

  function draw_cards(state) {
    const cards = [];
    const add = (name, label, show = text_of, kind = "train") => {
      const value = last(name, kind);
      if (value !== null) cards.push(card(show(value), label));
    };
    add("loss", "loss");
    add("held_out_bits", "held-out bits", text_of, "held_out");
    add("tokens_per_second", "tokens/s");
    add("step_seconds", "a step", (value) => (value < 1 ? `${text_of(1000 * value)} ms` : `${text_of(value)} s`));
    add("bubble", "idle", (value) => `${(100 * value).toFixed(1)}%`);
    add("tokens", "tokens trained");
    const seconds = last("step_seconds");
    if (state.state === "running" && seconds !== null && state.steps > state.step) {
      cards.push(card(duration(seconds * (state.steps - state.step)), "left"));
    }
    element("cards").replaceChildren(...cards);
  }

  function draw_ranks(ranks) {
    element("section-ranks").hidden = !ranks.length;
    const body = element("ranks").tBodies[0];
    body.replaceChildren(...ranks.map((one) => {
      const row = document.createElement("tr");
      const over = one.health === "running" || one.health === "silent" || one.health === "dead";
      const cells = [one.rank, one.host, "", one.step, over ? ago(one.step_age) : "", ago(one.age), size(one.rss)];
      for (const text of cells) row.insertCell().textContent = text;
      const pill = document.createElement("span");
      pill.className = "pill";
      pill.dataset.health = one.health;
      pill.textContent = one.health;
      if (one.error) row.title = one.error;
      row.cells[2].append(pill);
      return row;
    }));
  }

  function show_state(health, message) {
    const pill = element("state"), line = element("message");
    pill.textContent = health;
    pill.dataset.health = health;
    line.hidden = !message;
    line.textContent = message;
    line.classList.toggle("bad", health === "failed" || health === "dead");
  }

  function draw(state) {
    show_state(state.state, state.message);
    element("progress").textContent = state.steps ? `step ${state.step.toLocaleString("en")} of ${state.steps.toLocaleString("en")}` : state.step ? `step ${state.step}` : "";
    const bar = element("bar");
    bar.hidden = !state.steps;
    bar.max = state.steps || 1;
    bar.value = Math.min(state.step, state.steps);
    document.title = state.state === "running" && state.steps ? `${Math.floor((100 * state.step) / state.steps)}% ${state.title}` : `${state.title}: ${state.state}`;
    draw_cards(state);
    draw_ranks(state.ranks);
  }

  async function draw_timeline(step) {
    if (step === null || step === drawn) return;
    const answer = await fetch(`timeline?step=${step}`);
    if (!answer.ok) return;
    const timeline = await answer.json();
    drawn = step;
    element("section-timeline").hidden = false;
    const parts = [`step ${timeline.step}`, timeline.schedule, `${timeline.ranks} ranks`, timeline.makespan, `${timeline.idle} of the ranks' time idle`];
    if (timeline.omitted) parts.push(`${timeline.omitted.toLocaleString("en")} later blocks left out`);
    element("timeline-text").textContent = parts.filter((part) => part).join(", ");
    element("timeline-legend").replaceChildren(...timeline.kinds.map(([letter, meaning, colour]) => {
      const key = document.createElement("span"), swatch = document.createElement("i");
      swatch.style.background = colour;
      key.append(swatch, ` ${letter} ${meaning}`);
      return key;
    }));
    const plot = find("timeline-figure"), end = timeline.columns.right.reduce((a, b) => Math.max(a, b), 0) || 1;
    plot.height = 70 + Math.min(700, Math.max(70, 30 * timeline.ranks));
    plot.below[0].axis_label = `time (${timeline.unit || "ticks"})`;
    plot.x_range.setv({ start: 0, end: end * 1.005, reset_start: 0, reset_end: end * 1.005 });
    plot.y_range.setv({ start: timeline.ranks - 0.5, end: -0.5, reset_start: timeline.ranks - 0.5, reset_end: -0.5 });
    find("timeline").data = timeline.columns;
    label();
  }

  // Labels the blocks that are in sight and wide enough.
  function label() {
    const plot = find("timeline-figure"), source = find("timeline");
    if (!plot || !source) return;
    const { left, right, top, bottom, text, ink } = source.data;
    const { start, end } = plot.x_range, across = plot.inner_width / (end - start);
    const shown = { x: [], y: [], text: [], ink: [] };
    for (let n = 0; n < left.length && shown.x.length < 2000; n++) {
      const from = Math.max(left[n], start), to = Math.min(right[n], end);
      if ((to - from) * across < text[n].length * 7 + 2) continue;
      shown.x.push((from + to) / 2);
      shown.y.push((top[n] + bottom[n]) / 2);
      shown.text.push(text[n]);
      shown.ink.push(ink[n]);
    }
    find("timeline-labels").data = shown;
  }

  async function ask() {
    const answer = await fetch(`state?generation=${generation}&rows=${count}`);
    if (!answer.ok) throw new Error(answer.statusText);
    const state = await answer.json();
    if (state.generation !== generation) rows = [];
    const grown = state.generation !== generation || state.rows.length;
    ({ generation, count } = state);
    rows = rows.concat(state.rows);
    if (grown) draw_charts();
    draw(state);
    if (grown && drawn !== null && state.traced === null) drawn = null;
    await draw_timeline(state.traced);
  }

  async function poll() {
    try {
      await ask();
      lost = false;
    } catch (error) {
      if (!lost) show_state("lost", "penstock watch has ended, or cannot be reached. Start it again for a new address; the run is not affected.");
      lost = true;
    }
    document.body.dataset.ready = "yes";
    setTimeout(poll, document.hidden ? PERIOD_HIDDEN : PERIOD);
  }

  function follow_scheme() {
    const style = getComputedStyle(document.documentElement);
    const text = style.getPropertyValue("--text").trim(), line = style.getPropertyValue("--line").trim();
    for (const name of [...page.charts, "timeline"]) {
      const plot = find(`${name}-figure`);
      if (!plot) continue;
      for (const axis of [...plot.below, ...plot.left]) {
        axis.setv({ axis_label_text_color: text, major_label_text_color: text, axis_line_color: line, major_tick_line_color: line });
      }
      for (const grid of plot.center) if ("grid_line_color" in grid.attributes) grid.grid_line_color = line;
    }
    draw_charts();
  }

  async function begin() {
    for (const [place, item] of Object.entries(read("penstock-figures"))) await Bokeh.embed.embed_item(item, place);
    const plot = find("timeline-figure");
    for (const range of [plot.x_range, plot.properties.inner_width]) range.change.connect(() => requestAnimationFrame(label));
    dark.addEventListener("change", follow_scheme);
    follow_scheme();
    await poll();
  }

  return { begin, find, rows: () => rows };
})();
window.penstock.begin();
