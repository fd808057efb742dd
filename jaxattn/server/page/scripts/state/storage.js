// localStorage that never throws: a browser that stores nothing keeps values until the tab closes.

const PREFIX = "jaxattn.";
const memory = new Map();

/** A value that was stored, or `missing`. */
export function read(name, missing = null) {
  try {
    const text = localStorage.getItem(PREFIX + name) ?? memory.get(name);
    return text === null || text === undefined ? missing : JSON.parse(text);
  } catch {
    return missing;
  }
}

/** Stores a value; returns whether the browser keeps it when the tab closes. */
export function write(name, value) {
  const text = JSON.stringify(value);
  try {
    localStorage.setItem(PREFIX + name, text);
    memory.delete(name);
    return true;
  } catch {
    memory.set(name, text);
    return false;
  }
}

/** Stores a text as it is, for theme.js. */
export function writeText(name, text) {
  try {
    localStorage.setItem(PREFIX + name, text);
  } catch {
    memory.set(name, JSON.stringify(text));
  }
}

export function remove(name) {
  memory.delete(name);
  try {
    localStorage.removeItem(PREFIX + name);
  } catch {
    // nothing was stored
  }
}

/** The names of stored values that begin with `start`. */
export function names(start) {
  let stored = [];
  try {
    stored = Object.keys(localStorage);
  } catch {
    // nothing is stored
  }
  const found = stored.filter((key) => key.startsWith(PREFIX)).map((key) => key.slice(PREFIX.length));
  return [...new Set([...found, ...memory.keys()])].filter((name) => name.startsWith(start));
}

/** Calls back when another tab changes a value whose name begins with `start`. */
export function watch(start, changed) {
  addEventListener("storage", ({ key }) => {
    if (key === null || key.startsWith(PREFIX + start)) changed();
  });
}
