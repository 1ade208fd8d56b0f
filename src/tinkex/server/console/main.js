// The frame around the pages: shows the current page, asks for a key if one is needed, shows the service's state.

import { key, setKey, takeKeyFromAddress } from "./api.js";
import { checkpointsPage } from "./checkpoints.js";
import { clusterPage } from "./cluster.js";
import { comparePage } from "./compare.js";
import { fill, h, heading, notice } from "./dom.js";
import { failuresPage } from "./failures.js";
import { playgroundPage } from "./playground.js";
import { lost } from "./poll.js";
import { queuePage } from "./queue.js";
import { runPage } from "./run.js";
import { runsPage } from "./runs.js";
import { signInPage } from "./sign-in.js";
import { onState, startState, stopState } from "./state.js";

// A page is a function that fills `main` and returns a function that stops its work.
const PAGES = [
  [/^\/runs$/, "Runs", runsPage],
  [/^\/runs\/(.+)$/, "Run", runPage],
  [/^\/compare$/, "Compare", comparePage],
  [/^\/queue$/, "Queue", queuePage],
  [/^\/checkpoints$/, "Checkpoints", checkpointsPage],
  [/^\/playground$/, "Playground", playgroundPage],
  [/^\/failures$/, "Failures", failuresPage],
  [/^\/cluster$/, "Cluster", clusterPage],
];

const main = document.getElementById("main");
let leave = () => {};
let isFirst = true;

function show() {
  const [address, query] = location.hash.replace(/^#/, "").split("?");
  if (address === "" || address === "/") {
    history.replaceState(null, "", "#/runs");
    show();
    return;
  }
  begin();
  const found = PAGES.map(([pattern, title, page]) => [pattern.exec(plain(address)), title, page]).find(
    ([match]) => match,
  );
  if (found) {
    const [match, title, page] = found;
    document.title = `${title} · tinkex`;
    leave = page(main, { id: match[1], query: new URLSearchParams(query) }) ?? (() => {});
  } else {
    document.title = "tinkex";
    main.append(heading("No such page"), notice("This page does not exist. Choose one of the pages above.", "plain"));
  }
  mark(address === "/compare" ? "/runs" : address);
  arrive();
}

function plain(address) {
  try {
    return decodeURIComponent(address);
  } catch {
    return address; // a lone percent sign
  }
}

function begin() {
  leave();
  leave = () => {};
  main.replaceChildren();
}

/** Moves the focus to the heading of the new page, for keyboards and screen readers; not on the first page. */
function arrive() {
  window.scrollTo(0, 0);
  if (!isFirst) main.querySelector("h1")?.focus({ preventScroll: true });
  isFirst = false;
}

function mark(address) {
  for (const link of document.querySelectorAll("#nav a")) {
    const place = link.getAttribute("href").slice(1);
    if (address === place || address.startsWith(`${place}/`)) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function askForKey(reason) {
  if (document.getElementById("key")) return; // asked already, by an answer that came a moment sooner
  const wasGiven = key() !== null;
  setKey(null);
  stopState();
  begin();
  document.title = "Sign in · tinkex";
  document.getElementById("service").hidden = true;
  document.getElementById("sign-out").hidden = true;
  mark("");
  signInPage(main, wasGiven ? reason : null, (given) => {
    // After a reload the page holds no data of the former user.
    if (setKey(given)) location.reload();
    else {
      startState();
      show();
    }
  });
}

document.addEventListener("unauthorised", (event) => askForKey(event.detail));
window.addEventListener("hashchange", () => {
  if (location.hash.startsWith("#key=")) {
    takeKeyFromAddress();
    location.reload();
  } else show();
});
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address after # names a page
  main.focus();
});
document.getElementById("sign-out").addEventListener("click", () => {
  setKey(null);
  location.reload();
});
let state = null;
onState((now) => {
  state = now;
  showService();
});
document.addEventListener("connection", showService);

/** While the connection is lost nobody knows whether the service is ready. */
function showService() {
  if (!state) return;
  const service = document.getElementById("service");
  service.hidden = false;
  const word = lost() ? "No connection" : state.is_ready ? "Ready" : "Not ready";
  const isOn = word === "Ready";
  service.title = lost() ?? (isOn ? `tinkex ${state.version}` : state.reason);
  fill(service, `${word} ${state.tenant}`, () => [
    h("span", { class: `lamp ${isOn ? "is-on" : "is-off"}`, "aria-hidden": "true" }),
    h("span", {}, word),
    state.uses_keys && h("span", { class: "muted tenant" }, state.tenant),
  ]);
  document.getElementById("sign-out").hidden = !state.uses_keys;
  document.getElementById("cluster").hidden = !state.nodes?.length;
}

takeKeyFromAddress();
startState();
show();
