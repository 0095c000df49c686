// Reloads the page of a run that is under way, and keeps the reader's place: scroll position, step, zoom and what is open.
"use strict";
(() => {
  const QUIET = 2000; // milliseconds without the reader's hand before a reload
  const SHARE = 4; // a page stays at least this many times as long as it took to draw, so that it can be read on a slow machine
  const STALE = 300000; // milliseconds without a new version after which the page says so
  const note = document.getElementById("note");
  const said = note?.textContent;
  const chosen = document.getElementById("step");
  const every = 1000 * Number(note?.dataset.reload ?? 0);
  const place = history.state?.penstock ?? null;
  const loaded = Date.now();
  const since = every && place?.note === said ? place.since : loaded;
  let acted = 0, due = Infinity;

  const opened = () => [...document.querySelectorAll("details")].filter((one) => one.open).map((one) => one.querySelector("summary").textContent);
  const label = () => chosen?.selectedOptions[0].textContent;
  const ranges = () => ["x_range", "y_range"].map((name) => penstock.find("measured-figure")[name]);

  function here() {
    const latest = !chosen || chosen.selectedIndex === chosen.options.length - 1;
    return {
      top: window.scrollY, height: document.documentElement.scrollHeight, step: latest ? null : label(), drawn: label(), opened: opened(),
      zoom: ranges().map(({ start, end }) => ({ start, end })), note: said, since,
    };
  }

  function restore() {
    for (const one of document.querySelectorAll("details")) one.open = place.opened.includes(one.querySelector("summary").textContent);
    const option = chosen && [...chosen.options].find((one) => one.textContent === place.step);
    if (option) {
      chosen.value = option.value;
      penstock.show(Number(option.value));
    }
    if (label() === place.drawn) ranges().forEach((range, n) => range.setv(place.zoom[n]));
    document.documentElement.style.minHeight = "";
    window.scrollTo(0, place.top);
  }

  function reload() {
    history.scrollRestoration = "manual";
    history.replaceState({ penstock: here() }, "");
    location.reload();
  }

  function follow() {
    const now = Date.now();
    if (now - since > STALE) {
      const minutes = Math.floor((now - since) / 60000);
      note.textContent = `${said} No new version for ${minutes} minutes: a step takes long, or the run was killed. Its folder has logs.`;
    }
    if (now >= due && now - acted >= QUIET && !document.hidden) reload();
  }

  if (place) {
    // Room for the old place before everything is drawn.
    document.documentElement.style.minHeight = `${place.height}px`;
    window.scrollTo(0, place.top);
    history.replaceState(null, "");
    history.scrollRestoration = "auto";
  }
  for (const event of ["pointermove", "pointerdown", "wheel", "keydown"]) window.addEventListener(event, () => { acted = Date.now(); }, { passive: true });
  penstock.drawn.then(() => {
    if (place) restore();
    if (!every) return;
    const drawn = Date.now();
    due = drawn + Math.max(every, SHARE * (drawn - loaded));
    follow();
    setInterval(follow, 500);
  });
})();
