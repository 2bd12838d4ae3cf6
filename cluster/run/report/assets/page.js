"use strict";
// The page: data in, sections out.
(() => {
  const { make, label, sparkline, parts } = rollearn;
  const data = JSON.parse(document.getElementById("data").textContent);
  const several = data.runs.length > 1;
  const body = (id) => document.querySelector(`#${id} .body`);
  const swatch = (at) => {
    const element = make("span", { class: "swatch" });
    element.style.background = `var(--c${at % 8})`;
    return element;
  };

  function table(head, rows, classes = () => "") {
    return make("div", { class: "scroll" }, make("table", {},
      make("thead", {}, make("tr", {}, ...head.map((name) => name instanceof Node ? make("th", {}, name) : label("th", {}, name)))),
      make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell, at) =>
        cell instanceof Node ? make("td", {}, cell) : label("td", { class: classes(at, row) }, cell)))))));
  }

  parts.summary = (section) => {
    if (!several) {
      const run = data.runs[0];
      section.append(make("div", { class: "tiles" }, ...run.summary.map((tile) => {
        const column = run.columns[tile.key];
        return make("div", { class: "card tile" }, make("div", { class: "label" }, tile.label), make("div", { class: "value" }, tile.value),
          make("div", { class: "soft" }, tile.detail || "\u00a0"), column && column.x.length > 1 ? sparkline(column) : null);
      })));
      return;
    }
    const labels = [...new Set(data.runs.flatMap((run) => run.summary.map((tile) => tile.label)))];
    const named = data.runs.map((run, at) => make("span", {}, swatch(at), label("span", {}, run.name)));
    const rows = labels.map((name) => [name, ...data.runs.map((run) => {
      const tile = run.summary.find((each) => each.label === name);
      return tile ? make("span", {}, make("b", {}, tile.value), make("span", { class: "soft" }, tile.detail ? `  ${tile.detail}` : "")) : "–";
    })]);
    const verdicts = data.runs.map((run) => run.findings.length
      ? make("span", { class: "chips" }, ...run.findings.map((each) => make("span", { class: `badge ${each.severity}` }, each.id)))
      : make("span", { class: "badge right" }, "nothing found"));
    section.append(make("div", { class: "card" }, table(["", ...named], [...rows, ["Doctor", ...verdicts]])));
  };

  /** Text with flags that can be read and copied whole. */
  function withFlags(title, text) {
    return make("p", {}, make("b", {}, `${title} `),
      ...text.split(/(--[a-z][\w.-]*\w)/).map((piece, at) => label(at % 2 ? "code" : "span", { class: at % 2 ? "flag" : "" }, piece)));
  }

  function findingCard(finding, id, runName) {
    const evidence = make("dl", {});
    for (const [metric, seen] of Object.entries(finding.evidence)) {
      const name = rollearn.hasMetric(metric)
        ? label("button", { class: "linklike", type: "button", title: "Show the curve", click: () => rollearn.showMetric(metric) }, metric)
        : label("code", {}, metric);
      evidence.append(make("dt", {}, name), label("dd", {}, seen));
    }
    return make("article", { class: `card finding ${finding.severity}`, id },
      make("header", {}, make("span", { class: `badge ${finding.severity}` }, finding.severity), label("h3", {}, finding.id),
        make("span", { class: "soft" }, `since round ${finding.since}`), runName === null ? null : label("span", { class: "soft" }, runName)),
      evidence, withFlags("Why", finding.cause), withFlags("Do", finding.cure));
  }

  parts.findings = (section) => {
    const found = data.runs.flatMap((run, at) => run.findings.map((finding, place) => findingCard(finding, `finding-${at}-${place}`, several ? run.name : null)));
    section.append(found.length ? make("div", { class: "findings" }, ...found)
      : make("p", {}, make("span", { class: "badge right" }, "healthy"), " No known failure mode shows in these metrics."));
    for (const run of data.runs) {
      if (!run.skipped.length) continue;
      section.append(make("details", {}, label("summary", {}, `${several ? `${run.name}: ` : ""}${run.skipped.length} failure modes were not looked for, because the log lacks the metrics`),
        table(["failure mode", "needs"], run.skipped.map(([id, missing]) => [id, missing.join(", ")]))));
    }
  };

  function filtered(rows, head) {
    const holder = make("div");
    const input = make("input", { type: "search", placeholder: "Filter", "aria-label": "Filter settings" });
    const paint = () => holder.replaceChildren(table(head, rows.filter((row) => row[0].includes(input.value.trim())), () => "mono"));
    input.addEventListener("input", paint);
    paint();
    return [make("div", { class: "controls" }, input), holder];
  }

  parts.settings = (section) => {
    if (several) {
      section.append(make("div", { class: "card" }, make("h3", {}, "Where the runs differ"), data.settings.length
        ? table(["setting", ...data.runs.map((run) => run.name)], data.settings, () => "mono") : make("p", { class: "empty" }, "Their settings are the same.")));
    }
    for (const run of data.runs) {
      const names = Object.keys(run.settings);
      const differences = run.differences.length
        ? table(["setting", `preset ${run.preset}`, "this run"], run.differences, (at) => at === 2 ? "mono changed" : "mono")
        : make("p", { class: "empty" }, names.length ? `Everything is as the preset ${run.preset} gives it.` : "The run has no config.toml.");
      section.append(make("div", { class: "card" }, label("h3", {}, several ? `${run.name}: what is not the preset's` : "What is not the preset's"), differences,
        names.length ? make("details", {}, make("summary", {}, `All ${names.length} settings`), ...filtered(names.map((name) => [name, run.settings[name]]), ["setting", "value"])) : null));
    }
  };

  parts.around = (section) => {
    for (const run of data.runs) {
      if (several) section.append(label("h3", {}, run.name));
      const memory = Object.entries(run.columns).filter(([key]) => key.startsWith("memory/"))
        .sort().map(([key, column]) => [key.slice(7), `${(Math.max(...column.y) / 2 ** 30).toFixed(2)} GiB`]);
      const cards = [
        run.plan ? make("div", { class: "card plan" }, make("h3", {}, "Plan"), label("pre", {}, run.plan)) : null,
        memory.length ? make("div", { class: "card" }, make("h3", {}, "Most memory held"), table(["process", "peak"], memory)) : null,
        Object.keys(run.versions).length ? make("div", { class: "card" }, make("h3", {}, "Versions"), table(["package", "version"], Object.entries(run.versions))) : null,
        make("div", { class: "card" }, make("h3", {}, "Events"), run.events.length
          ? make("div", { class: "events" }, table(["time", "round", "what", "details"], run.events.toReversed().map((event) => [event.time.slice(0, 19).replace("T", " "), event.round, event.kind, event.details])))
          : make("p", { class: "empty" }, "Nothing out of the ordinary was recorded."),
        run.events_of > run.events.length ? make("p", { class: "hint" }, `The last ${run.events.length} of ${run.events_of}.`) : null),
      ].filter(Boolean);
      section.append(make("div", { class: "two" }, ...cards));
    }
  };

  function theme(dark) {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
  }

  const prefers = matchMedia("(prefers-color-scheme: dark)");
  theme(prefers.matches);
  prefers.addEventListener("change", () => { theme(prefers.matches); rollearn.recolour(); });
  document.getElementById("theme").addEventListener("click", () => {
    theme(document.documentElement.dataset.theme !== "dark");
    rollearn.recolour();
  });

  document.title = `${data.runs.map((run) => run.name).join(", ")} · rollearn`;
  const title = document.getElementById("title");
  title.replaceChildren(label("span", {}, data.runs.map((run) => run.name).join("  ·  ")));
  document.getElementById("subtitle").append(make("span", { class: "soft" }, `${several ? "comparison" : "run report"}, made ${data.made} by rollearn ${data.rollearn}`));
  document.getElementById("footer").append("Everything shown here is in the run directory as plain files: metrics.jsonl, events.jsonl, groups/*.parquet, config.toml.");
  for (const id of ["summary", "curves", "findings", "groups", "followed", "settings", "around"]) parts[id](body(id), data);
  document.documentElement.dataset.ready = "yes";
})();
