// Parses the inline part of Markdown: emphasis, code, links, math. Returns plain objects, no DOM.

const ESCAPABLE = /[!-/:-@[-`{-~]/;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const LONGEST_LABEL = 1000;
const LONGEST_TEXT = 20_000; // a longer paragraph is shown as it is
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const BARE_URL = /https?:\/\/[^\s<>`]+/y;
const SPECIAL = /[\\`*_~[\]!<&\nh]/;

/** The nodes of a text: {type, text} or {type, children}. */
export function parseInline(text, depth = 0) {
  if (text.length > LONGEST_TEXT) return [{ type: "text", text }];
  return new InlineParser(text, depth).parse();
}

/** The address if a link may lead there, else null: only web pages and mail. */
export function safeAddress(address) {
  return /^(https?:\/\/|mailto:)/i.test(address.trim()) ? address.trim() : null;
}

class InlineParser {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.at = 0;
    this.nodes = [];
    this.delimiters = [];
    this.missing = new Set(); // what is not there further on: runs of backticks, ends of formulas
  }

  parse() {
    while (this.at < this.text.length) this.step();
    pairEmphasis(this.nodes, this.delimiters);
    return merged(this.nodes);
  }

  step() {
    const { text } = this;
    const next = text.slice(this.at).search(SPECIAL);
    if (next !== 0) {
      const end = next < 0 ? text.length : this.at + next;
      return this.push({ type: "text", text: text.slice(this.at, end) }, end);
    }
    const character = text[this.at];
    const found =
      (character === "\\" && this.escape()) ||
      (character === "`" && this.code()) ||
      ("*_~".includes(character) && this.delimiter(character)) ||
      (character === "!" && text[this.at + 1] === "[" && this.link(this.at + 1)) ||
      (character === "[" && this.link(this.at)) ||
      (character === "<" && this.angle()) ||
      (character === "&" && this.entity()) ||
      (character === "\n" && this.lineBreak()) ||
      (character === "h" && this.bareUrl());
    if (!found) this.push({ type: "text", text: character }, this.at + 1);
  }

  push(node, end) {
    this.nodes.push(node);
    this.at = end;
    return true;
  }

  escape() {
    const { text, at } = this;
    const next = text[at + 1];
    if (next === "(" || next === "[") {
      const close = next === "(" ? "\\)" : "\\]";
      const end = this.missing.has(close) ? -1 : text.indexOf(close, at + 2);
      if (end < 0) this.missing.add(close);
      else return this.push({ type: "math", text: text.slice(at + 2, end).trim() }, end + 2);
    }
    if (next === "\n") return this.push({ type: "break" }, at + 2);
    if (next === undefined || !ESCAPABLE.test(next)) return false;
    return this.push({ type: "text", text: next }, at + 2);
  }

  code() {
    const { text, at } = this;
    let opened = at;
    while (text[opened] === "`") opened += 1;
    const length = opened - at;
    for (let start = opened; !this.missing.has(length); ) {
      const begin = text.indexOf("`", start);
      if (begin < 0) this.missing.add(length);
      else {
        start = begin;
        while (text[start] === "`") start += 1;
        if (start - begin !== length) continue;
        const inner = text.slice(opened, begin).replace(/\n/g, " ");
        const padded = /^ .*[^ ].* $|^ [^ ] $/.test(inner);
        return this.push({ type: "code", text: padded ? inner.slice(1, -1) : inner }, start);
      }
    }
    return this.push({ type: "text", text: "`".repeat(length) }, opened);
  }

  delimiter(character) {
    const { text, at } = this;
    let end = at;
    while (text[end] === character) end += 1;
    const length = end - at;
    if (character === "~" && length !== 2) {
      return this.push({ type: "text", text: text.slice(at, end) }, end);
    }
    const before = at ? text[at - 1] : " ";
    const after = end < text.length ? text[end] : " ";
    const left = !/\s/.test(after) && (!PUNCTUATION.test(after) || /\s/.test(before) || PUNCTUATION.test(before));
    const right = !/\s/.test(before) && (!PUNCTUATION.test(before) || /\s/.test(after) || PUNCTUATION.test(after));
    const word = character === "_";
    const node = { type: "text", text: text.slice(at, end) };
    this.delimiters.push({
      node,
      character,
      length,
      original: length,
      opens: word ? left && (!right || PUNCTUATION.test(before)) : left,
      closes: word ? right && (!left || PUNCTUATION.test(after)) : right,
    });
    return this.push(node, end);
  }

  link(bracket) {
    const { text } = this;
    if (this.depth > 3) return false;
    const close = matching(text, bracket);
    if (close < 0 || text[close + 1] !== "(") return false;
    const target = /\(\s*(?:<([^<>\n]*)>|([^\s()]*(?:\([^\s()]*\)[^\s()]*)*))(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;
    target.lastIndex = close + 1;
    const found = target.exec(text);
    if (!found) return false;
    const children = parseInline(text.slice(bracket + 1, close), this.depth + 1);
    const address = safeAddress(found[1] ?? found[2]);
    return this.push({ type: "link", address, children }, target.lastIndex);
  }

  angle() {
    const found = /<(?:(br)\s*\/?|((?:https?:\/\/|mailto:)[^\s<>]*))>/iy;
    found.lastIndex = this.at;
    const match = found.exec(this.text);
    if (!match) return false;
    if (match[1]) return this.push({ type: "break" }, found.lastIndex);
    const children = [{ type: "text", text: match[2] }];
    return this.push({ type: "link", address: safeAddress(match[2]), children }, found.lastIndex);
  }

  entity() {
    const form = /&(?:#(\d{1,7})|#x([\da-f]{1,6})|(amp|lt|gt|quot|apos|nbsp));/iy;
    form.lastIndex = this.at;
    const match = form.exec(this.text);
    if (!match) return false;
    const code = match[1] ? Number(match[1]) : parseInt(match[2], 16);
    const text = match[3] ? ENTITIES[match[3].toLowerCase()] : code > 0 && code < 0x110000 ? String.fromCodePoint(code) : "\ufffd";
    return this.push({ type: "text", text }, form.lastIndex);
  }

  lineBreak() {
    const last = this.nodes.at(-1);
    if (last?.type === "text") last.text = last.text.replace(/ +$/, "");
    return this.push({ type: "break" }, this.at + 1);
  }

  bareUrl() {
    if (this.depth > 0 || /\w/.test(this.text[this.at - 1] ?? " ")) return false;
    BARE_URL.lastIndex = this.at;
    const match = BARE_URL.exec(this.text);
    if (!match) return false;
    let address = match[0].replace(/[.,;:!?"'*_~]+$/, "");
    if (address.endsWith(")") && !address.includes("(")) address = address.slice(0, -1);
    const children = [{ type: "text", text: address }];
    return this.push({ type: "link", address, children }, this.at + address.length);
  }
}

/** Where the bracket at `open` is closed, or -1; escapes and nested brackets are passed over. */
function matching(text, open) {
  const end = Math.min(text.length, open + LONGEST_LABEL);
  let depth = 0;
  for (let at = open; at < end; at += 1) {
    if (text[at] === "\\") at += 1;
    else if (text[at] === "[") depth += 1;
    else if (text[at] === "]") {
      depth -= 1;
      if (depth === 0) return at;
    }
  }
  return -1;
}

/** CommonMark's pairing of runs of * and _, and of ~~: nodes between a pair become its children. */
function pairEmphasis(nodes, delimiters) {
  const floor = new Map(); // of closers that found no opener: how far down there is none
  for (let at = 0; at < delimiters.length; at += 1) {
    const closer = delimiters[at];
    if (!closer.closes || !closer.length) continue;
    const kind = `${closer.character}${closer.opens}${closer.original % 3}`;
    let found = -1;
    for (let down = at - 1; down >= (floor.get(kind) ?? 0); down -= 1) {
      const opener = delimiters[down];
      if (opener.character !== closer.character || !opener.opens || !opener.length) continue;
      const odd = (opener.closes || closer.opens) && (opener.original + closer.original) % 3 === 0;
      if (odd && (opener.original % 3 || closer.original % 3)) continue;
      found = down;
      break;
    }
    if (found < 0) {
      floor.set(kind, at);
      continue;
    }
    const opener = delimiters[found];
    const used = closer.character === "~" || (opener.length >= 2 && closer.length >= 2) ? 2 : 1;
    const begin = nodes.indexOf(opener.node) + 1;
    const end = nodes.indexOf(closer.node, begin);
    const type = closer.character === "~" ? "deleted" : used === 2 ? "strong" : "emphasis";
    nodes.splice(begin, end - begin, { type, children: merged(nodes.slice(begin, end)) });
    for (const each of [opener, closer]) {
      each.length -= used;
      each.node.text = each.node.text.slice(used);
    }
    for (const between of delimiters.slice(found + 1, at)) between.length = 0;
    if (closer.length) at -= 1;
  }
}

/** Without empty texts, and with neighbors joined. */
function merged(nodes) {
  const found = [];
  for (const node of nodes) {
    const last = found.at(-1);
    if (node.type === "text" && !node.text) continue;
    if (node.type === "text" && last?.type === "text") {
      found[found.length - 1] = { type: "text", text: last.text + node.text };
    } else found.push(node);
  }
  return found;
}
