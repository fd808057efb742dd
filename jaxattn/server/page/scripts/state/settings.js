// The fields of the settings panel: what is stored, what is sent, and what is wrong with them.

import { byId, counted } from "../view/element.js";
import * as storage from "./storage.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens"];
const FIELDS = [...NUMBERS, "system", "tools", "thinking"];
const PLAIN_TOKENS = 256; // of a continued text, which may have no end of its own

/** A field that cannot be sent as it is. */
export class SettingError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

/** Fills the fields from the storage, and stores them when they change. */
export function restoreSettings(changed) {
  const stored = storage.read("settings", {});
  for (const name of FIELDS) {
    const field = byId(name);
    field.value = stored[name] ?? "";
    field.addEventListener("input", () => {
      field.removeAttribute("aria-invalid");
      storage.write("settings", Object.fromEntries(FIELDS.map((each) => [each, byId(each).value])));
      changed();
    });
  }
}

/** Empties the sampling fields, so that the server's defaults apply. */
export function resetSampling() {
  for (const name of [...NUMBERS, "thinking"]) byId(name).value = "";
  byId("temperature").dispatchEvent(new Event("input"));
}

/** How many fields hold something else than the server's default. */
export const changedSampling = () => [...NUMBERS, "thinking"].filter((name) => byId(name).value !== "").length;

/** Shows the server's defaults where the user chose nothing. */
export function showDefaults({ defaults, chat, max_model_len: longest }) {
  for (const [name, value] of Object.entries(defaults)) {
    const off = (name === "top_k" || name === "min_p") && value === 0;
    byId(name).placeholder = off ? "off" : String(Math.round(value * 1e4) / 1e4);
  }
  byId("max_tokens").placeholder = chat ? `up to ${counted(longest)}` : String(PLAIN_TOKENS);
  for (const id of ["system-section", "tools-section", "thinking-row"]) byId(id).hidden = !chat;
}

/**
 * The fields of a request that the panel decides.
 *
 * Throws SettingError for a field out of range, and for tools that are no JSON list of functions.
 */
export function readSettings({ chat }) {
  const given = {};
  for (const name of NUMBERS) {
    const field = byId(name);
    if (!field.validity.valid) throw new SettingError(name, `${label(field)}: ${field.validationMessage}`);
    if (field.value !== "") given[name] = Number(field.value);
  }
  if (!chat) return { max_tokens: PLAIN_TOKENS, ...given };
  const thinking = byId("thinking").value;
  if (thinking) given.chat_template_kwargs = { enable_thinking: thinking === "on" };
  const tools = readTools();
  return tools.length ? { ...given, tools } : given;
}

const label = (field) => field.labels[0].textContent.trim();

function readTools() {
  const text = byId("tools").value.trim();
  if (!text) return [];
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new SettingError("tools", `Tools are not valid JSON: ${error.message}`);
  }
  const wrong = !Array.isArray(tools) || tools.some((tool) => typeof tool?.function?.name !== "string");
  if (wrong) throw new SettingError("tools", "Tools must be a list like the example: each tool needs a function with a name");
  return tools;
}

export const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city now.",
      parameters: {
        type: "object",
        properties: { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } },
        required: ["city"],
      },
    },
  },
];
