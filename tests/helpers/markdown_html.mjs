// Reads a JSON list of texts from stdin, and writes the HTML that the page's Markdown stands for.
// The page itself makes DOM nodes; HTML is what other renderers of Markdown can be compared by.

import { readFileSync } from "node:fs";

const folder = process.argv[2];
const { parseBlocks } = await import(`${folder}/blocks.js`);
const { parseInline } = await import(`${folder}/inline.js`);
const { highlight } = await import(`${folder}/highlight.js`);

const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/"/g, "&quot;");
const wrap = (tag, inner, more = "") => `<${tag}${more}>${inner}</${tag}>`;
const all = (nodes, of) => nodes.map(of).join("");

const INLINE = {
  text: ({ text }) => escaped(text),
  code: ({ text }) => wrap("code", escaped(text)),
  math: ({ text }) => wrap("math", escaped(text)),
  break: () => "<br />",
  strong: ({ children }) => wrap("strong", all(children, inlineNode)),
  emphasis: ({ children }) => wrap("em", all(children, inlineNode)),
  deleted: ({ children }) => wrap("s", all(children, inlineNode)),
  link: ({ address, children }) =>
    address === null ? all(children, inlineNode) : wrap("a", all(children, inlineNode), ` href="${escaped(address)}"`),
};
const inlineNode = (node) => INLINE[node.type](node);
const inline = (text) => all(parseInline(text), inlineNode);

const BLOCKS = {
  heading: ({ level, text }) => wrap(`h${level}`, inline(text)),
  paragraph: ({ text }) => wrap("p", inline(text)),
  rule: () => "<hr />",
  quote: ({ blocks }) => wrap("blockquote", all(blocks, block)),
  math: ({ text }) => wrap("math", escaped(text)),
  code({ language, text }) {
    const same = highlight(text, language).map((piece) => piece.text).join("") === text;
    if (!same) throw new Error(`highlighting changed ${JSON.stringify(text)}`);
    return wrap("pre", wrap("code", escaped(text && `${text}\n`), language && ` class="language-${escaped(language)}"`));
  },
  table({ head, align, rows }) {
    const cell = (tag) => (text, column) => wrap(tag, inline(text), align[column] === "left" ? "" : ` class="${align[column]}"`);
    const body = rows.length ? wrap("tbody", all(rows, (row) => wrap("tr", row.map(cell("td")).join("")))) : "";
    return wrap("table", wrap("thead", wrap("tr", head.map(cell("th")).join(""))) + body);
  },
  list({ ordered, start, loose, items }) {
    const entry = ({ blocks }) => wrap("li", all(blocks, (each) =>
      !loose && each.type === "paragraph" ? inline(each.text) : block(each)));
    return wrap(ordered ? "ol" : "ul", all(items, entry), ordered && start !== 1 ? ` start="${start}"` : "");
  },
};
const block = (found) => BLOCKS[found.type](found);

const texts = JSON.parse(readFileSync(0, "utf8"));
const answers = texts.map((text) => {
  const began = process.cpuUsage();
  const html = all(parseBlocks(text), block);
  return { html, ms: process.cpuUsage(began).user / 1000 };
});
process.stdout.write(JSON.stringify(answers));
