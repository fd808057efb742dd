// Parses the blocks of Markdown as language models write it: CommonMark's blocks and GitHub's tables,
// without raw HTML, indented code and link definitions. Returns plain objects, no DOM.

const DEEPEST = 12;
const FENCE = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})\s*(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:( +)(.*)|\s*)$/;
const UNDERLINE = /^ {0,3}(=+|-{2,})\s*$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const MATH = /^\s*(\$\$|\\\[)(.*)$/;
const TASK = /^\[([ xX])\] +/;
const MOST_COLUMNS = 64;

/**
 * The blocks of a text. Each has `source`, the lines that it was made of: a block with the same
 * source as before needs no new DOM while an answer streams.
 */
export function parseBlocks(text) {
  return blocksOf(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0);
}

function blocksOf(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, end] = blockAt(lines, at, depth);
    block.spaced = at > 0 && !lines[at - 1].trim() && blocks.length > 0; // a blank line is before it
    block.source = lines.slice(at, end).join("\n");
    blocks.push(block);
    at = end;
  }
  return blocks;
}

/** The block that begins at a line, and the line after it. */
function blockAt(lines, at, depth) {
  const line = lines[at];
  const heading = HEADING.exec(line);
  if (heading) return [{ type: "heading", level: heading[1].length, text: heading[2] ?? "" }, at + 1];
  if (FENCE.test(line)) return fence(lines, at);
  if (MATH.test(line)) {
    const found = math(lines, at);
    if (found) return found;
  }
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (depth < DEEPEST) {
    if (QUOTE.test(line)) return quote(lines, at, depth);
    if (ITEM.test(line) && indent(line) < 4) return list(lines, at, depth);
  }
  if (tableBegins(lines, at)) return table(lines, at);
  return paragraph(lines, at);
}

const indent = (line) => line.length - line.trimStart().length;

function fence(lines, at) {
  const [, space, mark, info] = FENCE.exec(lines[at]);
  const code = [];
  let end = at + 1;
  let closed = false;
  for (; end < lines.length && !closed; end += 1) {
    const line = lines[end];
    const ends = line.trim();
    closed = ends.length >= mark.length && ends === mark[0].repeat(ends.length) && indent(line) < 4;
    if (!closed) code.push(line.slice(Math.min(indent(line), space.length)));
  }
  const language = info.trim().split(/[\s{]/)[0].toLowerCase();
  return [{ type: "code", language, text: code.join("\n"), closed }, end];
}

/** A formula between lines; null where it has no end, as its text may be no formula. */
function math(lines, at) {
  const [, open, rest] = MATH.exec(lines[at]);
  const close = open === "$$" ? "$$" : "\\]";
  const found = [];
  for (let end = at, text = rest; end < lines.length && text.trim(); text = lines[end] ?? "") {
    end += 1;
    const place = text.indexOf(close);
    if (place >= 0) {
      if (text.slice(place + 2).trim()) return null;
      return [{ type: "math", text: [...found, text.slice(0, place)].join("\n").trim() }, end];
    }
    found.push(text);
  }
  return multiline(lines, at, close);
}

function multiline(lines, at, close) {
  const end = lines.findIndex((line, place) => place > at && line.trim() === close);
  const most = at + 40;
  if (end < 0 || end > most) return null;
  return [{ type: "math", text: lines.slice(at + 1, end).join("\n").trim() }, end + 1];
}

function quote(lines, at, depth) {
  const inner = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    if (QUOTE.test(lines[end])) inner.push(lines[end].replace(QUOTE, ""));
    else if (lines[end].trim() && inner.at(-1).trim() && !begins(lines, end)) inner.push(lines[end]);
    else break;
  }
  return [{ type: "quote", blocks: blocksOf(inner, depth + 1) }, end];
}

/** Whether a line ends a paragraph before it because it begins another block. */
function begins(lines, at) {
  const line = lines[at];
  const item = ITEM.exec(line);
  return (
    HEADING.test(line) || FENCE.test(line) || RULE.test(line) || QUOTE.test(line) ||
    (item !== null && item[4] !== undefined && indent(line) < 4 && /^([-*+]|1[.)])$/.test(item[2]))
  );
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const ordered = /\d/.test(first[2]);
  const kind = first[2].at(-1);
  const own = indent(lines[at]);
  const items = [];
  let end = at;
  let loose = false;
  while (end < lines.length) {
    const found = ITEM.exec(lines[end]);
    const same = found && found[2].at(-1) === kind && Math.abs(found[1].length - own) < 2;
    if (!same || RULE.test(lines[end])) break;
    const [item, next] = listItem(lines, end, found);
    items.push(item);
    end = next;
    let blank = end;
    while (blank < lines.length && !lines[blank].trim()) blank += 1;
    const again = blank < lines.length && blank > end && ITEM.exec(lines[blank]);
    if (again && again[2].at(-1) === kind && Math.abs(again[1].length - own) < 2) {
      end = blank;
      loose = true;
    }
  }
  const parsed = items.map((inner) => {
    const task = TASK.exec(inner[0]);
    if (task) inner[0] = inner[0].slice(task[0].length);
    return { checked: task ? task[1] !== " " : null, blocks: blocksOf(inner, depth + 1) };
  });
  loose ||= parsed.some(({ blocks }) => blocks.some(({ spaced }) => spaced));
  return [{ type: "list", ordered, start: parseInt(first[2], 10), loose, items: parsed }, end];
}

/** The lines of an item without their indent, and the line after it. */
function listItem(lines, at, found) {
  const gap = found[3]?.length ?? 1;
  const width = found[1].length + found[2].length + (gap > 4 ? 1 : gap);
  const inner = [found[4] === undefined ? "" : " ".repeat(gap > 4 ? gap - 1 : 0) + found[4]];
  let end = at + 1;
  let open = null; // the mark of a fence that goes on
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const space = indent(line);
    if (!line.trim()) {
      const next = lines.slice(end).find((each) => each.trim());
      if (next === undefined || !belongs(next, width, found)) break;
      inner.push("");
      continue;
    }
    const lazy = open === null && inner.at(-1).trim() && !begins(lines, end) && !ITEM.test(line);
    if (!belongs(line, width, found) && !lazy) break;
    const stripped = line.slice(Math.min(space, width));
    const mark = FENCE.exec(stripped);
    if (open === null && mark) open = mark[2];
    else if (open !== null && stripped.trim().startsWith(open)) open = null;
    inner.push(stripped);
  }
  return [inner, end];
}

/** Whether a line is part of an item; models indent lists below "1." by two spaces too. */
function belongs(line, width, found) {
  const space = indent(line);
  return space >= width || (space >= found[1].length + 2 && ITEM.test(line));
}

const tableBegins = (lines, at) =>
  lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") &&
  TABLE_RULE.test(lines[at + 1]) && cells(lines[at]).length === cells(lines[at + 1]).length;

/** The cells of a row; a bar behind a backslash or inside code is none. */
function cells(line) {
  const found = [];
  let cell = "";
  let code = false;
  const row = line.trim().replace(/^\|/, "");
  for (let at = 0; at < row.length; at += 1) {
    if (row[at] === "\\" && row[at + 1] === "|") {
      cell += "|";
      at += 1;
    } else if (row[at] === "|" && !(code && row.indexOf("`", at) > 0)) {
      found.push(cell.trim());
      cell = "";
    } else {
      if (row[at] === "`") code = !code;
      cell += row[at];
    }
  }
  if (cell.trim()) found.push(cell.trim());
  return found.slice(0, MOST_COLUMNS);
}

function table(lines, at) {
  const head = cells(lines[at]);
  const align = cells(lines[at + 1]).map((cell) =>
    cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left");
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].trim() && !begins(lines, end); end += 1) {
    const found = cells(lines[end]);
    rows.push(head.map((_, column) => found[column] ?? ""));
  }
  return [{ type: "table", head, align, rows }, end];
}

function paragraph(lines, at) {
  let end = at + 1;
  for (; end < lines.length && lines[end].trim(); end += 1) {
    const under = UNDERLINE.exec(lines[end]);
    if (under) {
      const text = joined(lines.slice(at, end));
      return [{ type: "heading", level: under[1][0] === "=" ? 1 : 2, text }, end + 1];
    }
    if (begins(lines, end) || tableBegins(lines, end)) break;
  }
  return [{ type: "paragraph", text: joined(lines.slice(at, end)) }, end];
}

const joined = (lines) => lines.map((line) => line.trimStart()).join("\n").trimEnd();
