// The page: which view is shown, who reads it, and when the server is asked.

import { Adapters } from "./adapters.js";
import { ApiError, askJson } from "./api.js";
import { byId, say } from "./dom.js";
import { Overview } from "./overview.js";
import { Playground } from "./playground.js";
import { Poll } from "./poll.js";
import { Requests } from "./requests.js";
import { session } from "./session.js";

const EVERY_MS = 2000;
const VIEWS = ["overview", "adapters", "requests", "playground"];

const overview = new Overview();
const adapters = new Adapters(() => overview.history.last);
const requests = new Requests();
const playground = new Playground();

let view = "overview";

function show() {
  const named = location.hash.slice(1);
  if (VIEWS.includes(named)) view = named;
  for (const name of VIEWS) {
    byId(name).hidden = name !== view || session.caller === null;
    const link = byId(`to-${name}`);
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  refresh();
}

/** Ask, if there is a caller to ask for, and say how the server is. */
function polled(work) {
  return new Poll(async () => {
    if (session.caller === null) return;
    try {
      await work();
    } catch (failure) {
      if (!(failure instanceof ApiError)) throw failure;
      fail(failure);
      return;
    }
    showState(overview.history.last?.isPaused ? "paused" : "answering");
  }, EVERY_MS);
}

const polls = [
  polled(() => overview.refresh()), // in every view, so that lines go on
  polled(async () => {
    if (view === "adapters") await adapters.refresh();
    if (view === "requests") await requests.refresh();
    if (view === "playground") await playground.refresh();
  }),
];

function refresh() {
  for (const poll of polls) poll.soon();
}

const STATES = {
  answering: "Answering",
  paused: "Paused",
  away: "Not answering",
  key: "Key needed",
};

function showState(name, text = STATES[name]) {
  byId("state").dataset.state = name;
  say(byId("state-text"), text);
}

function fail(failure) {
  if (failure.status === 401) {
    askForKey(failure.message);
    return;
  }
  showState("away", failure.status ? failure.message : STATES.away);
}

// ── the key ──────────────────────────────────────────────────────────────────────────────────

/** Find out what the key, or no key, may do, and begin anew. */
async function begin() {
  try {
    session.caller = await askJson("v1/caller");
  } catch (failure) {
    if (!(failure instanceof ApiError)) throw failure;
    session.caller = null;
    if (failure.status === 401) {
      askForKey(failure.message);
    } else {
      showState("away");
      setTimeout(begin, EVERY_MS);
    }
    show();
    return;
  }
  byId("key-view").hidden = true;
  const { name, may_change_server: mayChange } = session.caller;
  say(byId("caller"), mayChange ? `${name}, may change the server` : name);
  for (const part of [overview, adapters, requests, playground]) part.reset();
  show();
}

function askForKey(reason) {
  session.caller = null;
  showState("key");
  say(byId("key-error"), session.key ? reason : "");
  say(byId("caller"), "");
  openKey();
  show();
}

function openKey() {
  byId("key-view").hidden = false;
  byId("forget-key").hidden = !session.key;
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  session.key = byId("key").value.trim();
  byId("key").value = "";
  begin();
});
byId("forget-key").addEventListener("click", () => {
  session.key = "";
  begin();
});
byId("change-key").addEventListener("click", () => {
  if (byId("key-view").hidden) openKey();
  else if (session.caller !== null) byId("key-view").hidden = true;
});

// ── the page ─────────────────────────────────────────────────────────────────────────────────

window.addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => {
  if (document.hidden) overview.pause();
  else refresh();
});
try {
  say(byId("version"), (await askJson("version")).version);
} catch (failure) {
  if (!(failure instanceof ApiError)) throw failure; // `begin` says so
}
begin();
