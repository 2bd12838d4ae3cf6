"use strict";
// Text of a model on the page: always as text nodes, with everything that hides or reorders text made visible.
const rollearn = { parts: {} };

(() => {
  const CONTROLS = ("NUL SOH STX ETX EOT ENQ ACK BEL BS TAB LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB "
    + "ESC FS GS RS US").split(" ");
  const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\u2028\u2029\u115f\u1160\u3164\uffa0]/gu;

  /** Make an element: tag, properties, children (strings become text nodes). */
  function make(tag, properties = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name === "class") element.className = value;
      else if (name === "click") element.addEventListener("click", value);
      else if (name in element && name !== "list") element[name] = value;
      else element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }

  /** A character nobody would see, as a small sign that everybody sees. */
  function sign(character) {
    const code = character.codePointAt(0);
    const name = "U+" + code.toString(16).toUpperCase().padStart(4, "0");
    return make("span", { class: "ctrl", title: `control character ${name}` }, CONTROLS[code] ?? name);
  }

  /** Append text; hidden characters become signs. */
  function appendPlain(parent, text) {
    let from = 0;
    for (const match of text.matchAll(HIDDEN)) {
      if (match[0] === "\n" || match[0] === "\t") continue;
      if (match.index > from) parent.append(text.slice(from, match.index));
      parent.append(sign(match[0]));
      from = match.index + match[0].length;
    }
    if (from < text.length) parent.append(text.slice(from));
  }

  /** Start and end of the last \boxed{...} with balanced braces after the thinking; null without one. */
  function boxedIn(text, after) {
    for (let start = text.lastIndexOf("\\boxed{"); start >= after; start = text.lastIndexOf("\\boxed{", start - 1)) {
      let depth = 0;
      for (let at = start + 6; at < text.length; at++) {
        if (text[at] === "{") depth++;
        else if (text[at] === "}" && --depth === 0) return [start, at + 1];
      }
      if (start === 0) break;
    }
    return null;
  }

  /** Where the answer stands: boxed, or all of a short line after the thinking, without the tokens that end it. */
  function answerIn(text, close) {
    const after = close >= 0 ? close + "</think>".length : 0;
    const boxed = boxedIn(text, after);
    if (boxed || close < 0) return boxed;
    const rest = text.slice(after).replace(/(<\|?[^<>\s]{1,30}>|\s)+$/u, "");
    const answer = rest.trim();
    if (!answer || answer.length > 80 || answer.includes("\n")) return null;
    const start = after + rest.indexOf(answer);
    return [start, start + answer.length];
  }

  /** [start, end, class] of what is worth seeing in a response. */
  function marksIn(text, query) {
    const marks = [];
    const open = text.indexOf("<think>");
    const close = text.indexOf("</think>", Math.max(0, open));
    if (open >= 0) marks.push([open, close >= 0 ? close + 8 : text.length, "think"]);
    for (const match of text.matchAll(/<\/?think>|<\|?[^<>\s]{1,30}>$/gu)) marks.push([match.index, match.index + match[0].length, "tag"]);
    const answer = answerIn(text, close);
    if (answer) marks.push([...answer, "answer"]);
    if (query) {
      const low = text.toLowerCase();
      // Lower-casing may change lengths for a few letters; then hits are found but not coloured.
      for (let at = low.indexOf(query); low.length === text.length && at >= 0; at = low.indexOf(query, at + query.length)) {
        marks.push([at, at + query.length, "hit"]);
      }
    }
    return marks;
  }

  /** Text in an element, with thinking, answer and search hits marked. */
  function show(parent, text, query = "") {
    const marks = marksIn(text, query.toLowerCase());
    const borders = [...new Set([0, text.length, ...marks.flatMap(([start, end]) => [start, end])])].sort((a, b) => a - b);
    for (let at = 0; at + 1 < borders.length; at++) {
      const [start, end] = [borders[at], borders[at + 1]];
      const classes = marks.filter((mark) => mark[0] <= start && mark[1] >= end).map((mark) => mark[2]);
      const target = classes.length ? parent.appendChild(make("span", { class: classes.join(" ") })) : parent;
      appendPlain(target, text.slice(start, end));
    }
    return parent;
  }

  /** A block of text that is clipped when long, with a button that shows all of it. */
  function block(text, query = "") {
    const body = show(make("div", { class: "text", dir: "auto" }), text, query);
    if (text.length < 900 && text.split("\n").length < 14) return [body];
    body.classList.add("clipped");
    const more = make("button", { class: "more", type: "button", click: () => {
      more.textContent = body.classList.toggle("clipped") ? "Show all" : "Show less";
    } }, "Show all");
    return [body, more];
  }

  /** Short text in one line, for names and labels that come from a run. */
  function label(tag, properties, text) {
    const element = make(tag, properties);
    appendPlain(element, text);
    return element;
  }

  /** A number as people read it. */
  function number(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
    return String(Number(value.toPrecision(3)));
  }

  Object.assign(rollearn, { make, show, block, label, number });
})();
