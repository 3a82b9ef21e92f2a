// The page: two views, one of them shown, chosen by the part of the address after #.

import { startKeys } from "./api.js";
import { loadModels, startChat } from "./chat.js";
import { $, say } from "./dom.js";
import { pauseLive, startLive, wakeLive } from "./live.js";
import { showTrace, startSheet } from "./request.js";

function show() {
  const view = location.hash === "#live" ? "live" : "chat";
  for (const name of ["chat", "live"]) {
    $(name).hidden = name !== view;
    if (name === view) $(`to-${name}`).setAttribute("aria-current", "page");
    else $(`to-${name}`).removeAttribute("aria-current");
  }
  document.title = view === "live" ? "asyncllm: live" : "asyncllm";
  if (view === "live") wakeLive();
  else pauseLive();
}

function notice(text) {
  say($("notice"), text);
  $("notice").hidden = !text;
}

/** Ask for the models until the server is ready. */
async function untilReady() {
  for (;;) {
    try {
      await loadModels();
      notice("");
      return;
    } catch (error) {
      notice(error.status ? error.message : "The server does not answer.");
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
}

startKeys();
startSheet();
startChat((name) => showTrace(`v1/requests/${encodeURIComponent(name)}`));
startLive(notice);
addEventListener("hashchange", show);
show();
if (location.hash !== "#live") $("draft").focus();
untilReady();
