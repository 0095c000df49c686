// Lines of the memory chart: steps without the moments of less that are too narrow to see, such as that between the end of a
// backward and the next forward. Where there are too many changes, the most held per pixel column, with a band down to the least.
"use strict";
const memory_lines = (() => {
  const ROOM = 6; // pixels per change that steps need
  const NARROW = 4; // pixels below which a moment of less is left out of the steps
  const COLUMN = 2; // pixels that share one value of a line that has no steps

  // Returns the index of the last time that is not after t.
  function last_before(times, t) {
    let low = 0, high = times.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (times[middle] <= t) low = middle; else high = middle - 1;
    }
    return low;
  }

  // Returns the indices of the changes to draw.
  function visible(times, held, from, to, narrow) {
    const kept = [];
    for (let n = from; n <= to; n++) {
      const less = kept.length && n < to && held[n] < held[kept[kept.length - 1]] && held[n] < held[n + 1];
      if (less && times[n + 1] - times[n] < narrow) continue;
      if (kept.length && n < to && held[n] === held[kept[kept.length - 1]]) continue;
      kept.push(n);
    }
    return kept;
  }

  function steps(times, held, kept) {
    const xs = [], ys = [];
    kept.forEach((n, place) => {
      if (place) { xs.push(times[n]); ys.push(held[kept[place - 1]]); }
      xs.push(times[n]);
      ys.push(held[n]);
    });
    return { xs, ys, band: null };
  }

  function envelope(times, held, from, to, start, end, columns) {
    const most = new Float64Array(columns).fill(-Infinity), least = new Float64Array(columns).fill(Infinity);
    const width = (end - start) / columns;
    const column = (t) => Math.min(columns - 1, Math.max(0, Math.floor((t - start) / width)));
    for (let n = from; n <= to; n++) {
      if (n === to && n === times.length - 1) break; // nothing is known after the end
      const after = n + 1 < times.length ? times[n + 1] : end;
      if (after <= times[n]) continue; // replaced at once
      for (let c = column(times[n]); c <= column(after); c++) {
        most[c] = Math.max(most[c], held[n]);
        least[c] = Math.min(least[c], held[n]);
      }
    }
    const xs = [], ys = [], low = [];
    for (let c = 0; c < columns; c++) {
      if (most[c] < least[c]) continue;
      const left = start + c * width;
      xs.push(left, left + width);
      ys.push(most[c], most[c]);
      low.push(least[c], least[c]);
    }
    return { xs, ys, band: { xs: [...xs, ...xs.slice().reverse()], ys: [...ys, ...low.reverse()] } };
  }

  // Returns the line of one rank between two times on a chart of so many pixels, and its band, or null for steps.
  return (times, held, start, end, pixels) => {
    const from = last_before(times, start), to = Math.min(times.length - 1, last_before(times, end) + 1);
    const kept = visible(times, held, from, to, (NARROW * (end - start)) / pixels);
    if (kept.length * ROOM <= pixels) return steps(times, held, kept);
    const left = Math.max(start, times[0]), right = Math.min(end, times[times.length - 1]);
    return envelope(times, held, from, to, left, right, Math.max(1, Math.floor(pixels / COLUMN)));
  };
})();
