// Connects the page's controls with the chat and the monitor.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { Monitor } from "./monitor.js";
import { Start } from "./start.js";

const AT_ONCE = 8;

const find = (id) => document.getElementById(id);

const api = new Api((message) => {
  find("key-field").hidden = false;
  find("key-error").hidden = false;
  find("key-error").textContent = message;
  monitor.pause();
});
const start = new Start(
  api,
  find("start"),
  (question) => {
    find("question").value = question;
    find("form").requestSubmit();
  },
  (system) => {
    find("system").value ||= system;
    find("temperature").value ||= "0";
  },
);
const chat = new Chat(api, find("log"));
const monitor = new Monitor(api, (model) => start.load(model));

/** A number field's value; undefined, which JSON leaves out, if it is empty. */
function number(field) {
  return field.value === "" ? undefined : field.valueAsNumber;
}

/** Ask by this function of the question and the options, and wait for the answers. */
async function ask(asking) {
  const question = find("question").value;
  find("question").value = "";
  find("send").hidden = find("many").hidden = true;
  find("stop").hidden = false;
  const options = {
    system: find("system").value.trim(),
    temperature: number(find("temperature")),
    max_tokens: number(find("max-tokens")),
  };
  const answered = await asking(question, options);
  find("send").hidden = find("many").hidden = false;
  find("stop").hidden = true;
  find("log").scrollTop = find("log").scrollHeight; // the buttons may have made it smaller
  if (!answered) find("question").value ||= question; // to be sent again
  find("question").focus();
}

/** The message eight times, or eight of the model's own questions. */
function several(question) {
  if (question.trim()) return Array(AT_ONCE).fill(question);
  return start.questions.slice(0, AT_ONCE);
}

find("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!find("send").hidden) ask((question, options) => chat.ask(question, options));
});
find("many").addEventListener("click", () => {
  if (!several(find("question").value).length) find("question").reportValidity();
  else ask((question, options) => chat.askAll(several(question), options));
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
  find("key-error").hidden = true;
  monitor.retry();
});
monitor.run();
