// Splits code into colored pieces with one regular expression for each family of languages.

const LONGEST = 20_000;

const STRING = String.raw`"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?`;
const NUMBER = String.raw`\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][-+]?\d+)?)\w*\b`;
const words = (text) => String.raw`\b(?:${text.trim().split(/\s+/).join("|")})\b`;
const CALL = String.raw`\b[A-Za-z_]\w*(?=\()`;
const HASH = "#[^\n]*";
const SLASHES = String.raw`//[^\n]*|/\*[\s\S]*?(?:\*/|$)`;

const PYTHON = words(`
  and as assert async await break case class continue def del elif else except False finally for from
  global if import in is lambda match None nonlocal not or pass raise return self True try while with
  yield`);
const BRACES = words(`
  abstract as async await auto bool boolean break case catch char class const constexpr continue
  default defer delete do double else enum export extends extern false final finally float fn for
  from func function go goto if impl implements import in inline instanceof int interface let long
  loop match mod mut namespace new nil null nullptr number of override package private protected pub
  public range readonly return self short signed sizeof static string struct super switch template
  this throw trait true try type typedef typename typeof undefined union unsafe unsigned use using
  var virtual void volatile where while yield`);
const SHELL = words(`
  case cd do done echo elif else esac exit export fi for function if in local return set then unset
  while`);
const SQL = words(`
  ADD ALTER AND AS ASC BETWEEN BY CASE CREATE DELETE DESC DISTINCT DROP ELSE END EXISTS FROM GROUP
  HAVING IN INDEX INNER INSERT INTO IS JOIN KEY LEFT LIKE LIMIT NOT NULL ON OR ORDER OUTER PRIMARY
  RIGHT SELECT SET TABLE THEN UNION UPDATE VALUES VIEW WHEN WHERE WITH`);

const family = (parts, flags = "g") => new RegExp(
  Object.entries(parts).map(([kind, source]) => `(?<${kind}>${source})`).join("|"), flags);

const DOCSTRING = String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)`;
const TEMPLATE = "`(?:\\\\.|[^`\\\\])*`?";
const FAMILIES = {
  python: family({
    comment: HASH, string: String.raw`\b[rRbBfFuU]{0,2}(?:${DOCSTRING}|${STRING})|${DOCSTRING}|${STRING}`,
    number: NUMBER, keyword: PYTHON, meta: String.raw`@[\w.]+`, call: CALL,
  }),
  braces: family({
    comment: SLASHES, string: `${STRING}|${TEMPLATE}`, meta: String.raw`^\s*#\s*\w+|@\w+`,
    number: NUMBER, keyword: BRACES, call: CALL,
  }, "gm"),
  shell: family({
    comment: String.raw`(?<![\w$\\{])#[^\n]*`, string: STRING, meta: String.raw`\$\{[^}\n]*\}|\$\w+|(?<=\s)--?[\w-]+`,
    number: String.raw`\b\d+\b`, keyword: SHELL,
  }),
  sql: family({ comment: String.raw`--[^\n]*|/\*[\s\S]*?(?:\*/|$)`, string: STRING, number: NUMBER, keyword: SQL, call: CALL }, "gi"),
  json: family({ meta: String.raw`"(?:\\.|[^"\\\n])*"(?=\s{0,8}:)`, string: STRING, number: String.raw`-?${NUMBER}`, keyword: words("true false null") }),
  yaml: family({ comment: HASH, meta: String.raw`^[ -]*[\w.-]{1,64}(?=:)`, string: STRING, number: NUMBER, keyword: words("true false null yes no") }, "gm"),
  markup: family({ comment: String.raw`<!--[\s\S]*?(?:-->|$)`, keyword: String.raw`</?[A-Za-z][\w:-]*|/?>`, string: STRING, meta: String.raw`(?<![\w:-])[\w:-]{1,64}(?==)` }),
  css: family({ comment: String.raw`/\*[\s\S]*?(?:\*/|$)`, string: STRING, meta: String.raw`(?<![\w-])[\w-]{1,64}(?=\s{0,8}:)|@[\w-]+`, number: String.raw`#[\da-fA-F]{3,8}\b|-?\b\d[\d.]*[a-z%]*` }),
  diff: family({ string: String.raw`^\+[^\n]*`, deleted: String.raw`^-[^\n]*`, meta: String.raw`^@@[^\n]*` }, "gm"),
};

const LANGUAGES = {
  python: "python py python3 pyi jupyter",
  braces: "c h cpp c++ cc hpp cuda cu java js javascript jsx mjs ts typescript tsx rust rs go golang kotlin kt swift scala csharp cs c# dart php zig proto",
  shell: "bash sh shell zsh console terminal dockerfile docker makefile make powershell",
  sql: "sql postgresql mysql sqlite",
  json: "json json5 jsonc jsonl",
  yaml: "yaml yml toml ini",
  markup: "html xml svg vue markdown-html",
  css: "css scss less",
  diff: "diff patch",
};
const FAMILY_OF = new Map(
  Object.entries(LANGUAGES).flatMap(([name, found]) => found.split(" ").map((each) => [each, name])));

/** Pieces {kind, text} of code; kind is null for what has no color. Joined they are the code. */
export function highlight(code, language) {
  const expression = FAMILIES[FAMILY_OF.get(language)];
  if (!expression || code.length > LONGEST) return [{ kind: null, text: code }];
  const pieces = [];
  let end = 0;
  for (const match of code.matchAll(expression)) {
    if (!match[0]) continue;
    if (match.index > end) pieces.push({ kind: null, text: code.slice(end, match.index) });
    const [kind] = Object.entries(match.groups).find(([, text]) => text !== undefined);
    pieces.push({ kind, text: match[0] });
    end = match.index + match[0].length;
  }
  if (end < code.length) pieces.push({ kind: null, text: code.slice(end) });
  return pieces;
}
