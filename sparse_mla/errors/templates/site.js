"use strict";
// The search of the first page, and the values of a pasted message on an error's page. The rules are
// those of sparse_mla/errors/match.py and explain.py; what is put on a page is text, never HTML.

const search = (() => {
  const data = typeof records === "undefined" ? null : records;
  const HEAD = 500000, TAIL = 1500000, LONGEST_LINE = 2000, MOST_LINES = 20;
  const FOREIGN_SCORE = 22, WHOLE_LINE = 100, HINTED = 1000;
  const BEFORE_MESSAGE = /(?:^|[\w.]*(?:Error|Exception|Warning): ?|["'(])$/;

  const literals = (pieces) => pieces.filter((_, n) => n % 2 === 0);

  function clean(text) {
    if (text.length > HEAD + TAIL) text = text.slice(0, HEAD) + "\n" + text.slice(-TAIL);
    return text
      .replace(/\r\n?/g, "\n")
      .replace(/\x1b(?:\[[0-9;?]{0,32}[@-~]|\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)?|[@-Z\\-_])/g, "")
      .replace(/[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]/g, " ")
      .replaceAll("\\n", "\n")
      .replaceAll('\\"', '"')
      .replace(/[│┃|╭╮╰╯─━❱]/g, " ");
  }

  // A template as a pattern: its text with any spacing, its fields by the kind of value.
  const compiled = new Map();
  function compile(pieces) {
    const key = pieces.join("\0");
    if (compiled.has(key)) return compiled.get(key);
    const seen = new Set();
    let source = "";
    pieces.forEach((piece, n) => {
      if (n % 2 === 0) {
        const words = piece.split(/\s+/).map((word) => word.replace(/[.*+?^${}()|[\]\\/-]/g, "\\$&"));
        source += words.join("\\s+");
        return;
      }
      let pattern = Object.hasOwn(data.fields, piece) ? data.fields[piece] : data.anything;
      if (piece === "path" && pieces[n - 1]) pattern += "|" + data.pathWithSpaces;
      const isLast = n === pieces.length - 2 && pieces[n + 1] === "";
      if (isLast && pattern.endsWith("}?")) pattern = pattern.slice(0, -1) + "(?=\\s|$)";
      source += seen.has(piece) ? `\\k<${piece}>` : `(?<${piece}>${pattern})`;
      seen.add(piece);
    });
    const trimmed = literals(pieces).map((piece) => piece.trim());
    const template = {
      pattern: new RegExp(source),
      anchor: trimmed.reduce((best, piece) => (piece.length > best.length ? piece : best), ""),
      weight: trimmed.reduce((sum, piece) => sum + piece.length, 0),
    };
    compiled.set(key, template);
    return template;
  }

  function valuesOf(found) {
    const values = {};
    for (const [name, value] of Object.entries(found.groups || {}))
      if (value) values[name] = value.trim().replace(/^['"]+|['"]+$/g, "").trim();
    return values;
  }

  // The last lines that hold the anchor, latest first, each cut around it.
  function* linesWith(anchor, text) {
    let end = text.length;
    for (let n = 0; n < MOST_LINES && end > 0; n++) {
      const at = text.lastIndexOf(anchor, end - anchor.length);
      if (at < 0 || at + anchor.length > end) return;
      const start = Math.max(text.lastIndexOf("\n", at) + 1, at - LONGEST_LINE);
      const stop = text.indexOf("\n", at);
      const cut = at + LONGEST_LINE;
      yield text.slice(start, stop < 0 || stop > cut ? cut : stop).trim();
      end = at;
    }
  }

  function lastLine(template, text) {
    for (const line of linesWith(template.anchor, text)) {
      const found = template.pattern.exec(line);
      if (found) {
        const isWhole = BEFORE_MESSAGE.test(line.slice(0, found.index).trimEnd());
        return { values: valuesOf(found), isWhole };
      }
    }
    return null;
  }

  // The same in a short text whose lines a terminal or a frame has wrapped.
  function wrapped(template, text) {
    if (text.length > 100000) return null;
    const flat = text.split(/\s+/).join(" ");
    return flat.includes(template.anchor) ? lastLine(template, flat) : null;
  }

  function lastLines(text) {
    const lines = text.slice(-200 * LONGEST_LINE).split("\n").slice(-200);
    return lines.filter((line) => line.trim()).map((line) => line.slice(0, 500)).reverse();
  }

  function foreign(record, lines) {
    const pairs = lines.slice(1).map((line, n) => `${line} ${lines[n]}`);
    for (const line of record.foreign.length ? [...lines, ...pairs] : [])
      for (const pattern of record.foreign) {
        const found = new RegExp(pattern).exec(line);
        if (found) return valuesOf(found);
      }
    return null;
  }

  function inText(record, text, lines, hints) {
    const template = compile(record.message);
    const found = lastLine(template, text) || wrapped(template, text);
    let score = 0, values = {};
    if (found) {
      values = found.values;
      score = template.weight + (found.isWhole ? WHOLE_LINE : 0);
    } else if (text.slice(0, LONGEST_LINE).toLowerCase().includes(record.title.toLowerCase())) {
      score = record.title.length;
    }
    if (!score) {
      const others = foreign(record, lines);
      if (others) [values, score] = [others, FOREIGN_SCORE];
    }
    if (hints.has(record.id)) score += HINTED;
    if (!score) return null;
    const detail = compile(record.detail);
    const below = detail.anchor.length >= 8 && (lastLine(detail, text) || wrapped(detail, text));
    return { record, score, values: below ? { ...below.values, ...values } : values };
  }

  // The records that explain a text, best first.
  function find(text) {
    const named = data.records.find((record) => record.id === text.trim());
    if (named) return [{ record: named, score: HINTED, values: {} }];
    const cleaned = clean(text), lines = lastLines(cleaned), hints = new Set();
    for (const hint of cleaned.slice(-TAIL).matchAll(/sparse-mla explain ([a-z0-9]+(?:-[a-z0-9]+)*)/g))
      hints.add(hint[1]);
    return data.records
      .map((record) => inText(record, cleaned, lines, hints))
      .filter((match) => match)
      .sort((one, other) => other.score - one.score);
  }

  // Words of the records that a word may mean, with the certainty of each.
  function meant(word) {
    if (Object.hasOwn(data.words, word)) return [[word, 1]];
    const known = Object.keys(data.words);
    const longer = word.length > 2 ? known.filter((other) => other.startsWith(word)) : [];
    if (longer.length) return longer.map((other) => [other, 0.7]);
    const most = word.length < 4 ? 0 : word.length < 8 ? 1 : 2;
    return known.filter((other) => within(word.slice(0, 40), other, most)).slice(0, 4).map((other) => [other, 0.5]);
  }

  // Whether so few letters differ, are missing or are too many.
  function within(one, other, most) {
    if (!most || Math.abs(one.length - other.length) > most) return false;
    let row = Array.from({ length: other.length + 1 }, (_, n) => n);
    for (let i = 1; i <= one.length; i++) {
      const next = [i];
      for (let j = 1; j <= other.length; j++)
        next[j] = Math.min(row[j] + 1, next[j - 1] + 1, row[j - 1] + (one[i - 1] === other[j - 1] ? 0 : 1));
      row = next;
    }
    return row[other.length] <= most;
  }

  // Records that mention the words, best first.
  function byWords(text) {
    const totals = new Map();
    for (const word of new Set(text.slice(0, 2000).toLowerCase().match(/[a-z0-9_]+/g) || []))
      for (const [known, certainty] of meant(word)) {
        const places = data.words[known].match(/.../g);
        const rarity = Math.log(1 + data.records.length / places.length);
        for (const place of places) {
          const number = parseInt(place.slice(0, 2), 36), weight = data.weights[parseInt(place[2], 36)];
          totals.set(number, (totals.get(number) || 0) + certainty * rarity * weight);
        }
      }
    const ranked = [...totals].sort((one, other) => other[1] - one[1]);
    return ranked
      .filter(([, score]) => score >= ranked[0][1] / 10)
      .map(([number, score]) => ({ record: data.records[number], score, values: {} }));
  }

  return { find, byWords };
})();

// A template filled with values, or "" where one of them is not known.
function fill(pieces, values) {
  if (pieces.some((piece, n) => n % 2 === 1 && !Object.hasOwn(values, piece))) return "";
  return pieces.map((piece, n) => (n % 2 === 1 ? values[piece] : piece)).join("");
}

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function address(match) {
  const values = new URLSearchParams(match.values).toString();
  return `errors/${match.record.id}/index.html${values ? "#" + values : ""}`;
}

function link(match) {
  const made = element("a", match.record.title);
  made.href = address(match);
  return made;
}

function card(match) {
  const { record, values } = match;
  const box = element("article", "", "found");
  const title = element("h2");
  title.append(link(match));
  const message = element("p", "", "message");
  const text = fill(record.message, values) || record.message.map((p, n) => (n % 2 ? `{${p}}` : p)).join("");
  if (record.type) message.append(element("span", `${record.type}: `, "type"));
  message.append(text);
  box.append(title, message);
  const [yours, detail, fix] = ["yours", "detail", "fix"].map((name) => fill(record[name], values));
  if (Object.keys(values).length && yours) box.append(element("p", yours, "told"));
  if (detail) box.append(element("p", detail));
  if (fix) {
    const line = element("p");
    line.append(element("b", "Fix: "), fix);
    box.append(line);
  }
  const more = element("a", "Solutions, example and guard");
  more.href = address(match);
  const last = element("p");
  last.append(more);
  box.append(last);
  return box;
}

function listOf(matches) {
  const list = element("ul", "", "list");
  for (const match of matches) {
    const item = element("li");
    item.append(link(match), " ", element("code", match.record.id));
    list.append(item);
  }
  return list;
}

function show(text) {
  const results = document.getElementById("results"), status = document.getElementById("status");
  results.replaceChildren();
  results.hidden = true;
  status.textContent = "";
  if (!text.trim()) return;
  const explained = search.find(text);
  const matches = explained.length ? explained : search.byWords(text);
  if (!matches.length) {
    status.textContent = "No error matches. The lists below name them all.";
    return;
  }
  results.hidden = false;
  if (explained.length) {
    status.textContent = `Explained: ${matches[0].record.title}.`;
    results.append(card(matches[0]));
    if (matches.length > 1) results.append(element("h3", "Also possible"), listOf(matches.slice(1, 5)));
  } else {
    const count = matches.length, shown = count > 10 ? "the best ten are shown" : "the best first";
    status.textContent = count === 1 ? "1 error mentions this." : `${count} errors mention this, ${shown}.`;
    results.append(listOf(matches.slice(0, 10)));
  }
}

function startSearch(form) {
  const box = document.getElementById("text");
  let waiting = 0;
  form.hidden = false;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    clearTimeout(waiting);
    show(box.value);
  });
  box.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => show(box.value), 150);
  });
  if (box.value) show(box.value);
  if (location.hash === "#search") box.focus();
}

// On an error's page: what the pasted message, whose values the address carries, told.
function showYours(section) {
  const values = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const filled = JSON.parse(section.dataset.filled);
  section.querySelectorAll("p").forEach((old) => old.remove());
  const lines = Object.entries(filled)
    .filter(([, pieces]) => pieces.length > 1)
    .map(([name, pieces]) => [name, fill(pieces, values)])
    .filter(([, text]) => text);
  for (const [name, text] of lines) section.append(element("p", name === "fix" ? `Fix: ${text}` : text));
  section.hidden = lines.length === 0;
  for (const field of document.querySelectorAll("var[data-field]")) {
    const name = field.dataset.field;
    field.textContent = Object.hasOwn(values, name) ? values[name] : `{${name}}`;
  }
}

function addCopyButton(code) {
  const around = element("div", "", "copied"), button = element("button", "Copy");
  button.type = "button";
  button.addEventListener("click", () =>
    navigator.clipboard.writeText(code.textContent).then(
      () => { button.textContent = "Copied"; },
      () => { button.textContent = "Select and copy by hand"; },
    ),
  );
  code.replaceWith(around);
  around.append(code, button);
}

const form = document.getElementById("search"), yours = document.getElementById("yours");
if (form) startSearch(form);
if (yours) {
  showYours(yours);
  addEventListener("hashchange", () => showYours(yours));
}
if (navigator.clipboard) document.querySelectorAll("article pre:not(.source)").forEach(addCopyButton);
