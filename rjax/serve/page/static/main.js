// Connects the page's controls with the chat and the monitor.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { Monitor } from "./monitor.js";

const find = (id) => document.getElementById(id);

const api = new Api(() => {
  find("key-field").hidden = false;
  monitor.pause();
});
const chat = new Chat(api, find("log"));
const monitor = new Monitor(api);

/** A number field's value; undefined, which JSON leaves out, if it is empty. */
function number(field) {
  return field.value === "" ? undefined : field.valueAsNumber;
}

async function send() {
  const question = find("question").value;
  find("question").value = "";
  find("send").hidden = true;
  find("stop").hidden = false;
  const options = {
    system: find("system").value.trim(),
    temperature: number(find("temperature")),
    max_tokens: number(find("max-tokens")),
  };
  const answered = await chat.ask(question, options);
  find("send").hidden = false;
  find("stop").hidden = true;
  if (!answered) find("question").value ||= question; // to be sent again
  find("question").focus();
}

find("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!find("send").hidden) send();
});
find("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  find("form").requestSubmit();
});
find("stop").addEventListener("click", () => chat.stop());
find("clear").addEventListener("click", () => chat.clear());
find("key").addEventListener("change", () => {
  api.setKey(find("key").value);
  monitor.retry();
});
monitor.run();
