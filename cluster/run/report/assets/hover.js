"use strict";
// The pointer over a curve: its round and all values beside it, and a line at the same round in every other curve.
(() => {
  const { make, label, number } = rollearn;

  /** The frame of a drawn chart in pixels of its plot, and the scale of its rounds; null while it is not laid out. */
  function frameOf(entry) {
    const frame = entry.view?.frame;
    if (!(frame?.bbox?.width > 0)) return null;
    const { left, top, width, height } = frame.bbox;
    return { left, top, width, height, scale: frame.x_scale };
  }

  /** Index of the value that is nearest to a round. */
  function nearest(rounds, round) {
    let [low, high] = [0, rounds.length - 1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (rounds[middle] <= round) low = middle;
      else high = middle;
    }
    return Math.abs(rounds[low] - round) <= Math.abs(rounds[high] - round) ? low : high;
  }

  function place(entry, round) {
    const frame = frameOf(entry);
    if (!frame) return;
    const x = frame.scale.compute(round);
    const inside = x >= frame.left - 1 && x <= frame.left + frame.width + 1;
    entry.cursor ??= entry.plot.appendChild(make("div", { class: "cursor" }));
    Object.assign(entry.cursor.style, {
      display: inside ? "block" : "none", left: `${x}px`, top: `${frame.top}px`, height: `${frame.height}px`,
    });
  }

  function readout(entry, round, frame) {
    const shown = entry.lines.filter((line) => !line.hidden.size);
    const rows = shown.map((line) => {
      const at = nearest(line.column.x, round);
      const swatch = make("span", { class: "swatch" });
      swatch.style.background = `var(${line.colour})`;
      const where = line.column.x[at] === round ? "" : ` (round ${line.column.x[at]})`;
      return make("div", {}, swatch, label("span", {}, line.name + where), make("b", {}, number(line.column.y[at])));
    });
    entry.readout ??= entry.plot.appendChild(make("div", { class: "readout" }));
    entry.readout.replaceChildren(make("div", {}, make("span", { class: "soft" }, `round ${round}`)), ...rows);
    const right = frame.scale.compute(round) > frame.left + frame.width / 2;
    Object.assign(entry.readout.style, {
      display: "block", top: `${frame.top + 4}px`,
      left: right ? "auto" : `${frame.scale.compute(round) + 12}px`,
      right: right ? `${entry.plot.clientWidth - frame.scale.compute(round) + 12}px` : "auto",
    });
  }

  /** Let the pointer read a chart; `charts` are all of them. */
  rollearn.watch = (entry, charts) => {
    entry.cursor = entry.readout = null;
    if (entry.watched) return;
    entry.watched = true;
    const hide = () => {
      for (const other of charts) if (other.cursor) other.cursor.style.display = "none";
      if (entry.readout) entry.readout.style.display = "none";
    };
    const read = (event) => {
      const frame = frameOf(entry);
      const x = event.clientX - entry.plot.getBoundingClientRect().left;
      if (!frame || x < frame.left || x > frame.left + frame.width) return hide();
      const rounds = entry.lines.flatMap((line) => line.column.x).sort((a, b) => a - b);
      const round = rounds[nearest(rounds, frame.scale.invert(x))];
      for (const other of charts) if (other.view) place(other, round);
      readout(entry, round, frame);
    };
    entry.plot.addEventListener("pointermove", read);
    entry.plot.addEventListener("pointerdown", read);
    entry.plot.addEventListener("pointerleave", hide);
  };
})();
