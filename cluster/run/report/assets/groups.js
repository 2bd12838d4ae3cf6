"use strict";
// The group browser: one round at a time, the best, worst and most disputed groups, search over all that is kept here.
(() => {
  const { make, block, show, label, number } = rollearn;
  const TAGS = { all: "All", disputed: "Most disputed", best: "Best", worst: "Worst", random: "Drawn at random" };
  const SORTS = { reward: "by reward", k: "by number", length: "by length" };
  const MOST_HITS = 200;
  const state = { run: 0, place: 0, tag: "all", group: null, query: "", sort: "reward" };
  let data, nodes;

  const groups = () => data.runs[state.run].groups;
  const round = () => groups().rounds[state.place];

  function responsesOf(group) {
    const fields = groups().fields;
    return group.responses.map((values) => Object.fromEntries(fields.map((field, at) => [field, values[at]])));
  }

  function matches(group, query) {
    return [group.prompt, group.answer, group.row, ...group.responses.map((values) => values[1])]
      .some((text) => text.toLowerCase().includes(query));
  }

  /** What the list shows: groups of the round, or hits in all rounds. */
  function listed() {
    const fits = (group) => state.tag === "all" || group.tags.includes(state.tag);
    if (!state.query) return round().groups.filter(fits).map((group) => ({ group, place: state.place }));
    const hits = [];
    groups().rounds.forEach((each, place) => {
      for (const group of each.groups) if (fits(group) && matches(group, state.query)) hits.push({ group, place });
    });
    return hits;
  }

  /** One dot per response: right, wrong, or not graded. */
  function dots(group) {
    return make("span", { class: "dots", "aria-hidden": "true" }, ...[...group.marks].slice(0, 64).map((mark, at) =>
      make("i", { class: `mark-${mark}`, title: number(group.rewards[at]) })));
  }

  function item({ group, place }) {
    const where = state.query ? `round ${groups().rounds[place].round}` : group.tags.map((tag) => TAGS[tag].toLowerCase()).join(", ");
    const button = make("button", { class: "item", type: "button", click: () => select(group, place) },
      make("span", { class: "head" }, make("span", {}, where), make("b", {}, number(group.mean))),
      show(make("span", { class: "prompt", dir: "auto" }), group.prompt, state.query), dots(group));
    if (group === state.group) button.setAttribute("aria-current", "true");
    return button;
  }

  function select(group, place) {
    state.group = group;
    state.place = place;
    paint();
    if (matchMedia("(max-width: 760px)").matches) nodes.detail.scrollIntoView({ block: "start" });
  }

  function facts(pairs) {
    return make("div", { class: "facts" }, ...pairs.filter(([, value]) => value !== null && value !== "")
      .map(([name, value]) => make("span", {}, `${name} `, label("b", {}, String(value)))));
  }

  function responseCard(response, parts) {
    const finish = response.finished ? null : make("span", { class: "badge cutoff" }, "cut at the length limit");
    const advantage = response.advantage === null ? null
      : make("span", { class: response.advantage >= 0 ? "up" : "down", title: "advantage" },
        `advantage ${response.advantage > 0 ? "+" : ""}${number(response.advantage)}`);
    return make("article", { class: "card response" },
      make("header", {}, make("span", {}, `#${response.k}`),
        label("span", { class: `badge ${response.outcome === "right" ? "right" : "wrong"}` }, response.outcome),
        make("b", {}, number(response.total)),
        ...parts.map((part, at) => make("span", {}, label("span", {}, `${part} `), number(response.parts[at]))),
        advantage, make("span", {}, `${response.length} tokens${response.finished ? ", finished" : ""}`), finish,
        response.attempt ? make("span", {}, `attempt ${response.attempt + 1}`) : null),
      ...block(response.text, state.query));
  }

  function sorted(responses) {
    if (state.sort === "reward") return responses.toSorted((a, b) => b.total - a.total || a.k - b.k);
    if (state.sort === "length") return responses.toSorted((a, b) => b.length - a.length || a.k - b.k);
    return responses;
  }

  function detail(group) {
    const shown = round();
    const responses = sorted(responsesOf(group));
    const left = group.size - responses.length;
    return [
      make("div", { class: "card prompt-box" }, ...block(group.prompt, state.query),
        facts([["answer", group.answer], ["mean reward", number(group.mean)], ["spread", number(group.spread)],
          ["round", shown.round], ["row", group.row], ["occurrence", group.occurrence || null], ["domain", group.domain],
          ["minibatch", group.minibatch], ["weights version", group.version], ["engine", group.engine],
          ["left out of training", group.dropped]])),
      left ? make("p", { class: "hint" }, `${responses.length} of ${group.size} responses, from the best to the worst.`) : null,
      make("div", { class: "responses" }, ...responses.map((response) => responseCard(response, shown.parts))),
    ].filter(Boolean);
  }

  function paint() {
    const shown = round();
    const entries = listed();
    if (!entries.some((entry) => entry.group === state.group)) {
      state.group = entries[0]?.group ?? null;
      if (state.group && state.query) state.place = entries[0].place;
    }
    nodes.slider.max = String(groups().rounds.length - 1);
    nodes.slider.value = String(state.place);
    nodes.output.textContent = `round ${round().round}`;
    nodes.back.disabled = state.place === 0;
    nodes.forth.disabled = state.place === groups().rounds.length - 1;
    for (const [tag, button] of Object.entries(nodes.tags)) button.setAttribute("aria-pressed", String(tag === state.tag));
    nodes.hint.textContent = state.query
      ? `${entries.length > MOST_HITS ? `first ${MOST_HITS} of ` : ""}${entries.length} groups with a hit, in ${groups().rounds.length} rounds`
      : `${shown.groups.length} of ${shown.of} groups of this round${shown.committed ? "" : " (not committed yet)"}; all of them are in ${shown.file}`;
    nodes.list.replaceChildren(...entries.slice(0, MOST_HITS).map(item));
    nodes.detail.replaceChildren(...(state.group ? detail(state.group) : [make("p", { class: "empty" }, "No group fits.")]));
  }

  function go(step) {
    state.place = Math.max(0, Math.min(groups().rounds.length - 1, state.place + step));
    clearQuery();
    paint();
  }

  function clearQuery() {
    state.query = nodes.search.value = "";
    state.group = null;
  }

  function controls() {
    nodes.back = make("button", { type: "button", "aria-label": "Earlier round", click: () => go(-1) }, "◀");
    nodes.forth = make("button", { type: "button", "aria-label": "Later round", click: () => go(1) }, "▶");
    nodes.slider = make("input", { type: "range", min: "0", "aria-label": "Round" });
    nodes.slider.addEventListener("input", () => go(Number(nodes.slider.value) - state.place));
    nodes.output = make("output", {});
    nodes.search = make("input", { type: "search", placeholder: "Search prompts, answers and responses", "aria-label": "Search" });
    nodes.search.addEventListener("input", () => {
      state.query = nodes.search.value.trim().toLowerCase();
      state.group = null;
      paint();
    });
    nodes.tags = Object.fromEntries(Object.entries(TAGS).map(([tag, name]) => [tag, make("button", { type: "button", click: () => {
      state.tag = tag;
      paint();
    } }, name)]));
    const order = make("select", { "aria-label": "Order of the responses" },
      ...Object.entries(SORTS).map(([value, name]) => make("option", { value }, name)));
    order.addEventListener("change", () => {
      state.sort = order.value;
      paint();
    });
    const run = make("select", { id: "group-run", "aria-label": "Run" },
      ...data.runs.map((each, at) => each.groups.rounds.length ? label("option", { value: String(at) }, each.name) : null));
    run.addEventListener("change", () => {
      Object.assign(state, { run: Number(run.value), place: 0 });
      state.place = groups().rounds.length - 1;
      clearQuery();
      paint();
    });
    return make("div", { class: "controls" }, data.runs.length > 1 ? run : null,
      make("div", { class: "round" }, nodes.back, nodes.slider, nodes.forth, nodes.output), nodes.search,
      make("div", { class: "tags", role: "group", "aria-label": "Which groups" }, ...Object.values(nodes.tags)), order);
  }

  /** Put the browser into the section. */
  rollearn.parts.groups = (section, given) => {
    data = given;
    state.run = data.runs.findIndex((run) => run.groups.rounds.length);
    if (state.run < 0) {
      section.append(make("p", { class: "empty" }, "No groups are kept in groups/ of the run directory."));
      return;
    }
    state.place = groups().rounds.length - 1;
    nodes = {};
    nodes.hint = make("p", { class: "hint" });
    nodes.list = make("div", { class: "list", "aria-label": "Groups" });
    nodes.detail = make("div", { class: "detail" });
    section.append(controls(), nodes.hint, make("div", { class: "browser" }, nodes.list, nodes.detail));
    paint();
  };

  /** The first response to the same prompts, over the rounds. */
  rollearn.parts.followed = (section, given) => {
    const runs = given.runs.filter((run) => run.followed.length);
    section.append(make("p", { class: "hint" }, runs.length
      ? "Always response 0 of the group, not the best one; the mean is over the whole group."
      : "No prompt occurs in more than one of the rounds that are kept."));
    for (const run of runs) {
      if (given.runs.length > 1) section.append(label("h3", {}, run.name));
      run.followed.forEach((prompt, at) => {
        const summary = show(make("summary", { dir: "auto" }), prompt.prompt.slice(0, 160));
        const details = make("details", { class: "card followed" }, summary);
        const fill = () => {
          if (details.childElementCount > 1) return;
          details.append(facts([["answer", prompt.answer], ["row", prompt.row]]), make("div", { class: "visits" }, ...prompt.visits.map((visit) =>
            make("article", { class: "card response visit" },
              make("header", {}, make("b", {}, `after ${visit.version} rounds`),
                label("span", { class: `badge ${visit.outcome === "right" ? "right" : "wrong"}` }, visit.outcome),
                make("span", {}, `mean of ${visit.size}: ${number(visit.mean)}`), make("span", {}, `${visit.length} tokens`),
                visit.finished ? null : make("span", { class: "badge cutoff" }, "cut")),
              ...block(visit.text)))));
        };
        details.addEventListener("toggle", fill);
        if (at === 0 && run === runs[0]) {
          details.open = true;
          fill();
        }
        section.append(details);
      });
    }
  };
})();
