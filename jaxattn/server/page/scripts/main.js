// Starts the page: makes its parts, and tells each of them what the others have done.

import { apiKey, setApiKey } from "./api/client.js";
import { StatsFeed } from "./api/stats_feed.js";
import { Chat } from "./chat.js";
import { Conversations } from "./state/conversations.js";
import { changedSampling, EXAMPLE_TOOLS, resetSampling, restoreSettings, showDefaults } from "./state/settings.js";
import * as storage from "./state/storage.js";
import { Composer } from "./view/composer.js";
import { byId } from "./view/element.js";
import { decorate } from "./view/icons.js";
import { ServerPanel } from "./view/server_panel.js";
import { Drawer, keepFolds, showConversations, themeButton } from "./view/sidebar.js";
import { Thread } from "./view/thread.js";
import { Welcome } from "./view/welcome.js";

const PHASES = {
  starting: ["loading", "busy"],
  ready: ["ready", "good"],
  draining: ["shutting down", "bad"],
  failed: ["failed", "bad"],
  key: ["API key required", "busy"],
  connection: ["no connection", "bad"],
};

const conversations = new Conversations();
const feed = new StatsFeed();
const thread = new Thread({
  edit: (index, text) => chat.edit(index, text),
  regenerate: (index) => chat.regenerate(index),
  resume: () => chat.resume(),
  sendResults: (results) => chat.sendResults(results),
});
const chat = new Chat({ conversations, feed, thread, changed: refresh, refused: showRefused });
const composer = new Composer({
  ask: (text) => {
    notice("");
    return chat.ask(text);
  },
  stop: () => chat.stop(),
});
const welcome = new Welcome({
  fill: (text) => {
    composer.fill(text);
    composer.field.focus();
  },
  retry: () => feed.poll(),
});
const server = new ServerPanel();
const FINE = matchMedia("(pointer: fine)"); // a focus opens no keyboard over the page

// Sidebar first: on a narrow screen one drawer covers the other.
const sidebar = new Drawer("sidebar", "toggle-sidebar", "sidebar");
const panel = new Drawer("panel", "toggle-panel", "sliders");
themeButton();
keepFolds();
for (const [id, name] of [["new-chat", "plus"], ["jump", "down"], ["close-sidebar", "close"], ["close-panel", "close"]]) decorate(byId(id), name);

/** Shows what may have changed with a turn or another conversation. */
function refresh() {
  composer.set({ running: chat.running, ready: feed.ready });
  if (FINE.matches && document.activeElement === document.body) composer.field.focus();
  showWelcome();
  showConversations(conversations, { open, remove });
  location.hash === `#${conversations.current.id}` ||
    history.replaceState(null, "", conversations.current.messages.length ? `#${conversations.current.id}` : "#");
}

/** Shows what stands in the place of messages, once the server has answered or is missed. */
function showWelcome() {
  const { latest, problem } = feed;
  if (latest || problem) welcome.update({ latest: latest ?? {}, problem }, conversations.current.messages.length === 0);
}

function notice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

/** Names a setting that cannot be sent, and goes to it. */
function showRefused(error) {
  notice(error.message);
  panel.set(true);
  const field = byId(error.field);
  field.closest("details").open = true;
  field.setAttribute("aria-invalid", "true");
  field.focus();
}

async function open(id) {
  if (id === conversations.current.id) return Drawer.closeCovering();
  await chat.ended();
  if (conversations.open(id)) thread.show(conversations.current.messages);
  thread.toEnd();
  notice("");
  Drawer.closeCovering();
  refresh();
}

async function begin() {
  await chat.ended();
  conversations.begin();
  thread.show([]);
  notice("");
  Drawer.closeCovering();
  refresh();
  composer.field.focus();
}

async function remove(id) {
  if (id === conversations.current.id) await chat.ended();
  conversations.delete(id);
  thread.show(conversations.current.messages, chat.running);
  refresh();
}

async function removeAll() {
  if (!confirm("Delete all conversations of this browser?")) return;
  await chat.ended();
  conversations.deleteAll();
  thread.show([]);
  refresh();
}

function showFeed() {
  const { latest, problem } = feed;
  const [said, tone] = PHASES[problem ?? latest.phase];
  if (byId("phase").textContent !== said) byId("phase").textContent = said;
  byId("state").className = tone;
  byId("key-section").hidden = !apiKey();
  if (latest) {
    document.title = latest.model;
    byId("model").textContent = latest.model;
    showDefaults(latest);
    byId("prompt").placeholder = latest.chat ? `Message ${latest.model}` : "A text to continue";
    if (problem === null) server.update(latest);
  }
  composer.set({ ready: feed.ready });
  showWelcome();
}

function showChangedSampling() {
  const count = changedSampling();
  byId("changed").textContent = count ? `${count} changed` : "";
  byId("reset").hidden = count === 0;
}

restoreSettings(() => {
  notice("");
  showChangedSampling();
});
showChangedSampling();
byId("reset").addEventListener("click", resetSampling);
byId("example-tools").addEventListener("click", () => {
  byId("tools").value = JSON.stringify(EXAMPLE_TOOLS, null, 2);
  byId("tools").dispatchEvent(new Event("input"));
});
byId("forget-key").addEventListener("click", () => {
  setApiKey("");
  feed.poll();
});
byId("new-chat").addEventListener("click", begin);
byId("delete-all").addEventListener("click", removeAll);
byId("scrim").addEventListener("click", Drawer.closeCovering);
byId("close-sidebar").addEventListener("click", () => sidebar.toggle());
byId("close-panel").addEventListener("click", () => panel.toggle());
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && Drawer.closeCovering()) event.preventDefault();
  if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    begin();
  }
});
addEventListener("pagehide", () => chat.running && conversations.save());
addEventListener("hashchange", () => {
  const id = location.hash.slice(1);
  if (id) open(id);
});
document.addEventListener("visibilitychange", () => document.hidden || feed.poll());
storage.watch("chat.", () => {
  // Another tab may have carried this conversation on.
  const { id, changed } = conversations.current;
  if (!chat.running && conversations.open(id) && conversations.current.changed !== changed) thread.show(conversations.current.messages);
  refresh();
});
feed.listen(showFeed);

if (conversations.open(location.hash.slice(1))) thread.show(conversations.current.messages);
refresh();
feed.poll();
if (FINE.matches) composer.field.focus();
