"use strict";
// Curves, drawn by BokehJS when they come into view; all share one range of rounds.
(() => {
  const { make, label } = rollearn;
  const COLOURS = 8;
  const DASHES = ["solid", "dashed", "dotted", "dotdash"];
  const range = { start: null, end: null, full: [0, 1] };
  const charts = [];
  let moving = false;

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const severityColour = (severity) => css({ critical: "--bad", warning: "--warn", info: "--accent" }[severity]);

  /** The lines of a chart: one per metric, or one per metric and run. */
  function linesOf(chart, runs) {
    const keys = chart.stacked && runs.length > 1 ? ["time/round"] : chart.keys;
    const lines = [];
    keys.forEach((key, place) => runs.forEach((run, at) => {
      const column = run.columns[key];
      if (!column) return;
      const colour = runs.length > 1 ? at : place;
      const name = runs.length > 1 ? (keys.length > 1 ? `${run.name} · ${key}` : run.name) : key;
      const dash = runs.length > 1 ? DASHES[place % DASHES.length] : "solid";
      lines.push({ key, run: run.name, name, column, colour: `--c${colour % COLOURS}`, dash, hidden: new Set() });
    }));
    return lines;
  }

  /** Findings whose evidence is drawn in a chart. */
  function findingsOn(chart, runs) {
    return runs.flatMap((run, at) => run.findings
      .map((finding, place) => ({ ...finding, run: run.name, anchor: `finding-${at}-${place}` }))
      .filter((finding) => Object.keys(finding.evidence).some((key) => chart.keys.includes(key))));
  }

  function isWide(lines) {
    const values = lines.flatMap((line) => line.column.y);
    if (!values.length || values.some((value) => value <= 0)) return false;
    const sorted = values.toSorted((a, b) => a - b);
    return sorted[sorted.length - 1] / sorted[Math.floor(sorted.length / 20)] > 300;
  }

  function yRange(chart, lines) {
    if (chart.scale === "auto") return {};
    const values = lines.flatMap((line) => [...line.column.y, ...(line.column.high ?? [])]);
    const top = chart.stacked ? null : Math.max(...values);
    const low = Math.min(0, ...values);
    if (chart.scale === "share") return { y_range: [0, Math.min(1.02, Math.max(0.05, top * 1.1))] };
    return top === null ? {} : { y_range: [low < 0 ? low * 1.1 : 0, top > 0 ? top * 1.1 : 1] };
  }

  function figureFor(chart, lines) {
    const ink = css("--soft");
    const log = chart.scale === "auto" && isWide(lines);
    const figure = Bokeh.Plotting.figure({
      sizing_mode: "stretch_both", toolbar_location: null, tools: [], output_backend: "canvas",
      x_range: [range.start, range.end], y_axis_type: log ? "log" : "linear", ...(log ? {} : yRange(chart, lines)),
      background_fill_alpha: 0, border_fill_alpha: 0, outline_line_alpha: 0, min_border: 2,
      min_border_right: 10,
    });
    for (const axis of [...figure.xaxes, ...figure.yaxes]) {
      axis.major_label_text_color = ink;
      axis.major_label_text_font_size = "11px";
      axis.axis_line_color = css("--line");
      axis.major_tick_line_color = css("--line");
      axis.minor_tick_line_color = null;
    }
    const [below, left] = [figure.xaxes[0], figure.yaxes[0]];
    below.ticker.min_interval = 1;
    left.axis_label = chart.unit || null;
    left.axis_label_text_color = ink;
    left.axis_label_text_font_size = "11px";
    left.axis_label_text_font_style = "normal";
    const largest = Math.max(...lines.flatMap((line) => line.column.y.map(Math.abs)));
    if (!log && largest > 0 && largest < 1e-3) left.formatter = new Bokeh.BasicTickFormatter({ precision: 1 });
    if (chart.unit === "bytes") left.formatter = new Bokeh.NumeralTickFormatter({ format: "0.0 b" });
    for (const grid of figure.center.filter((each) => each.type === "Grid")) grid.grid_line_color = css("--grid");
    return figure;
  }

  function drawLines(figure, chart, lines) {
    for (const line of lines) {
      const colour = css(line.colour);
      const { x, y, low, high } = line.column;
      line.renderers = [];
      if (low && chart.scale === "share") line.renderers.push(figure.varea(x, low, high, { fill_color: colour, fill_alpha: 0.16 }));
      line.renderers.push(figure.line(x, y, {
        line_color: colour, line_width: 1.8, line_join: "round", line_dash: line.dash,
      }));
      if (x.length <= 40) line.renderers.push(figure.scatter(x, y, { fill_color: colour, line_color: colour, size: x.length === 1 ? 8 : 4 }));
    }
  }

  function drawStack(figure, lines) {
    const rounds = [...new Set(lines.flatMap((line) => line.column.x))].sort((a, b) => a - b);
    let below = rounds.map(() => 0);
    for (const line of lines) {
      const at = new Map(line.column.x.map((round, place) => [round, line.column.y[place]]));
      const above = below.map((value, place) => value + (at.get(rounds[place]) ?? 0));
      const colour = css(line.colour);
      line.renderers = [figure.varea(rounds, below, above, { fill_color: colour, fill_alpha: 0.75 })];
      const edge = figure.line(rounds, above, { line_color: colour, line_width: 1 });
      line.renderers.push(edge);
      below = above;
    }
    figure.y_range.start = 0;
  }

  function drawFindings(figure, findings) {
    for (const finding of findings) {
      figure.add_layout(new Bokeh.Span({
        location: finding.since, dimension: "height", line_color: severityColour(finding.severity), line_width: 1.5,
        line_dash: [4, 3],
      }));
    }
  }

  /** Moving in one chart moves all of them. */
  function link(figure) {
    const moved = () => {
      if (moving) return;
      moving = true;
      [range.start, range.end] = [figure.x_range.start, figure.x_range.end];
      for (const chart of charts) if (chart.figure && chart.figure !== figure) chart.figure.x_range.setv({ start: range.start, end: range.end });
      moving = false;
    };
    figure.x_range.properties.start.change.connect(moved);
    figure.x_range.properties.end.change.connect(moved);
  }

  async function draw(entry) {
    const { chart, lines, findings, plot } = entry;
    const figure = figureFor(chart, lines);
    if (chart.stacked && entry.runs.length === 1) drawStack(figure, lines);
    else drawLines(figure, chart, lines);
    drawFindings(figure, findings);
    const coarse = matchMedia("(pointer: coarse)").matches;
    if (!coarse) {
      const zoom = new Bokeh.BoxZoomTool({ dimensions: "width" });
      figure.add_tools(zoom);
      figure.toolbar.active_drag = zoom;
    }
    entry.figure = figure;
    link(figure);
    for (const line of lines) for (const renderer of line.renderers) renderer.visible = !line.hidden.size;
    entry.view = await Bokeh.Plotting.show(figure, plot);
    rollearn.watch(entry, charts);
    plot.dataset.drawn = "yes";
  }

  function clear(entry) {
    entry.view?.remove?.();
    entry.view = entry.figure = null;
    entry.plot.replaceChildren();
    delete entry.plot.dataset.drawn;
  }

  function zoomOut() {
    [range.start, range.end] = range.full;
    for (const entry of charts) entry.figure?.x_range.setv({ start: range.start, end: range.end });
  }

  /** A button that hides and shows some lines; a line is drawn while nothing hides it. */
  function toggle(name, lines, swatch) {
    const button = make("button", { type: "button", "aria-pressed": "true", click: () => {
      const hide = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!hide));
      for (const line of lines) {
        if (hide) line.hidden.add(button);
        else line.hidden.delete(button);
        for (const renderer of line.renderers ?? []) renderer.visible = !line.hidden.size;
      }
    } }, swatch, label("span", {}, name));
    return button;
  }

  /** One button per metric; with several runs, one per run by colour and one per metric by dash. */
  function legendOf(entry) {
    const several = entry.runs.length > 1;
    const names = (field) => [...new Set(entry.lines.map((line) => line[field]))];
    const button = (field, name) => {
      const lines = entry.lines.filter((line) => line[field] === name);
      const byDash = several && field === "key";
      const swatch = make("span", { class: byDash ? `swatch ${lines[0].dash}` : "swatch" });
      swatch.style.color = byDash ? "var(--soft)" : `var(${lines[0].colour})`;
      return toggle(name, lines, swatch);
    };
    const keys = names("key");
    return make("div", { class: "legend" },
      ...(several ? names("run").map((name) => button("run", name)) : []),
      ...(several && keys.length === 1 ? [] : keys.map((name) => button("key", name))));
  }

  function card(chart, runs) {
    const entry = { chart, runs, lines: linesOf(chart, runs), findings: findingsOn(chart, runs), figure: null };
    entry.plot = make("div", { class: "plot", role: "img", "aria-label": `${chart.title} over rounds` });
    entry.plot.addEventListener("dblclick", zoomOut);
    const grow = make("button", { type: "button", "aria-label": `Enlarge ${chart.title}`, click: () => {
      entry.element.classList.toggle("wide");
      entry.element.scrollIntoView({ block: "nearest" });
    } }, "⤢");
    const chips = make("div", { class: "chips" }, ...entry.findings.map((finding) => {
      const where = runs.length > 1 ? `${finding.run}: ` : "";
      return label("a", { class: `badge ${finding.severity}`, href: `#${finding.anchor}`, title: `since round ${finding.since}` }, `${where}${finding.id} · ${finding.since}`);
    }));
    entry.element = make("article", { class: "card chart", id: `chart-${chart.id}` },
      make("header", {}, make("h3", {}, chart.title), grow),
      label("p", { class: "note" }, chart.note),
      legendOf(entry), entry.findings.length ? chips : null, entry.plot);
    return entry;
  }

  /** Put all charts into the section. */
  rollearn.parts.curves = (section, data) => {
    const rounds = data.runs.flatMap((run) => Object.values(run.columns).flatMap((column) => column.x));
    if (!rounds.length) {
      section.append(make("p", { class: "empty" }, "No round has been recorded yet."));
      return;
    }
    const [first, last] = rounds.reduce(([low, high], round) => [Math.min(low, round), Math.max(high, round)], [Infinity, -Infinity]);
    const margin = Math.max(0.3, (last - first) * 0.015);
    range.full = [first - margin, last + margin];
    [range.start, range.end] = range.full;
    const visible = new IntersectionObserver((entries) => {
      for (const seen of entries) {
        const entry = charts.find((each) => each.plot === seen.target);
        if (seen.isIntersecting && !entry.figure) draw(entry);
      }
    }, { rootMargin: "300px" });
    for (const chart of data.charts) {
      const entry = card(chart, data.runs);
      charts.push(entry);
      section.append(entry.element);
      visible.observe(entry.plot);
    }
    const averaged = data.runs.filter((run) => run.per_point > 1).map((run) => `${run.name}: each point is the mean of ${run.per_point} rounds`);
    if (averaged.length) section.before(label("p", { class: "hint" }, averaged.join("; ") + "."));
  };

  /** Draw again what is drawn: the colours of the page have changed. */
  rollearn.recolour = () => {
    for (const entry of charts.filter((each) => each.figure)) {
      clear(entry);
      draw(entry);
    }
  };

  /** Scroll to the first chart that shows a metric. */
  rollearn.showMetric = (metric) => {
    const entry = charts.find((each) => each.chart.keys.includes(metric));
    if (!entry) return;
    entry.element.scrollIntoView({ block: "center" });
    entry.element.classList.remove("flash");
    requestAnimationFrame(() => entry.element.classList.add("flash"));
  };
  rollearn.hasMetric = (metric) => charts.some((each) => each.chart.keys.includes(metric));

  /** A small line without axes. */
  rollearn.sparkline = (column) => {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 100 30");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    const [low, high] = [Math.min(...column.y), Math.max(...column.y)];
    const x0 = column.x[0];
    const wide = Math.max(1e-9, column.x[column.x.length - 1] - x0);
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    line.setAttribute("points", column.x.map((x, at) => {
      const y = high > low ? 27 - (24 * (column.y[at] - low)) / (high - low) : 15;
      return `${(((x - x0) / wide) * 100).toFixed(2)},${y.toFixed(2)}`;
    }).join(" "));
    for (const [name, value] of Object.entries({ fill: "none", stroke: "var(--c0)", "stroke-width": "1.6", "vector-effect": "non-scaling-stroke" })) line.setAttribute(name, value);
    svg.append(line);
    return svg;
  };
})();
