"""Tries the page of a server in headless Chromium.

page.py http://ADDRESS EXPECTED [CHROMIUM] [SHOTS]

EXPECTED is a word of the answer to "What is the capital of France?". CHROMIUM is the browser, by
default the one that `playwright install chromium` fetched. SHOTS is a folder for screenshots.
The script needs the package playwright. The server needs no key.
"""

import base64
import json
import re
import sys

from playwright.sync_api import expect, sync_playwright

address, expected = sys.argv[1:3]
chromium = sys.argv[3] if len(sys.argv) > 3 else None
shots = sys.argv[4] if len(sys.argv) > 4 else None

FRANCE = "What is the capital of France?"
# An answer that is complete at once has no speed.
FIGURES = re.compile(r"\d+ tokens, ([\d.]+ a second, )?first after [\d.]+ s, \d+ tokens read")

MARKDOWN = r"""# A plan for `gemma`

Some *italic*, _this too_, **bold with `code`** and ***both***, snake_case_names, 2*3*4, \*plain\*,
[a link](https://example.org/a_(b)) and https://example.org/x_y_z.

1.  **Install:** it is quick.

    ```sh
    echo '<b>*no emphasis*</b>'   # a comment that is wider than a window of four hundred pixels
    ```
2.  Try:
    * first
    * second
        - deepest

3.  Done.

> A quote
> of two lines

| size | tokens a second |
|:-----|---:|
| `a` | 33 |
| a\|b | averyveryveryveryveryveryverylongwordwithoutanyspaceinit |

***
Roses are red,
violets are blue.

## Injection
<img src=x onerror="document.title='hacked'"><script>document.title = 'hacked'</script>
[click](javascript:alert(1)) [too](javascript://%0Aalert(1)) [data](data:text/html,x)
![image](https://example.org/i.png)

```html
<img src=x onerror="document.title='hacked'">
"""

# Sends events of `size` characters each to a chat, and draws after each of them. Marks the first
# block when there are more than four.
SCRIPTED = """({ text, size }) => {
  window.requestAnimationFrame = draw => { queueMicrotask(draw); return 1; };
  const real = window.fetch;
  window.fetch = async (path, options) => {
    if (!path.includes("completions")) return real(path, options);
    const parts = text.match(new RegExp(`[^]{1,${size}}`, "g"));
    const deltas = [{ reasoning_content: "<i>Hm" }, ...parts.map(content => ({ content }))];
    const events = deltas.map(delta => ({ choices: [{ delta }] }));
    events.push({ choices: [], usage: { prompt_tokens: 57, completion_tokens: 312 } });
    const send = async out => {
      for (const event of events) {
        out.enqueue(`data: ${JSON.stringify(event)}\\n\\n`);
        await new Promise(resolve => setTimeout(resolve));
        const answer = [...document.querySelectorAll(".answer")].at(-1);
        if (answer.children.length > 4) answer.firstChild.dataset.kept = "yes";
      }
      out.enqueue("data: [DONE]\\n\\n");
      out.close();
    };
    const body = new ReadableStream({ start: out => { send(out); } });
    return new Response(body.pipeThrough(new TextEncoderStream()));
  };
}"""


# An image of one pixel.
DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAA"
    "AABJRU5ErkJggg=="
)

# Passes a file to an element, like a paste and like a drop.
HANDED = """([kind, bytes]) => {
  const data = new DataTransfer(), text = document.getElementById("text");
  data.items.add(new File([new Uint8Array(bytes)], "dot.png", { type: "image/png" }));
  const own = kind === "paste" ? { clipboardData: data } : { dataTransfer: data };
  const Kind = kind === "paste" ? ClipboardEvent : DragEvent;
  text.dispatchEvent(new Kind(kind, { bubbles: true, cancelable: true, ...own }));
}"""


class Page:
    """A page of the server. Its requests, messages and width are checked."""

    def __init__(self, browser, script="", **options):
        self.context = browser.new_context(**options)
        self.context.grant_permissions(["clipboard-read", "clipboard-write"])
        if script:
            self.context.add_init_script(script)
        self.page = self.context.new_page()
        self.said, self.foreign = [], []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.foreign.append(request.url)
                     if not request.url.startswith((address, "data:image/")) else None)
        self.page.goto(address)
        self.send, self.text = self.at("#send"), self.at("#text")
        self.users, self.answers = self.at("article.user"), self.at("article.assistant")

    def at(self, selector):
        return self.page.locator(selector)

    def button(self, name, of=None):
        return (of or self.page).get_by_role("button", name=name, exact=True)

    def idle(self):
        expect(self.send).to_have_text("Send", timeout=120_000)

    def ask(self, text):
        self.text.fill(text)
        self.text.press("Enter")
        expect(self.text).to_have_value("")
        self.idle()

    def begin_long(self):
        """Requests an answer that continues until the context is full."""
        def lengthen(route):
            route.continue_(post_data={**route.request.post_data_json, "ignore_eos": True})

        self.page.route("**/v1/chat/completions", lengthen)
        self.text.fill("Tell me about the sea.")
        self.send.click()
        expect(self.send).to_have_text("Stop")
        expect(self.answers.last.locator(".answer")).not_to_be_empty()
        self.page.unroute("**/v1/chat/completions")

    def clipboard(self):
        return self.page.evaluate("navigator.clipboard.readText()")

    def shot(self, name):
        if shots:
            self.page.screenshot(path=f"{shots}/{name}.png")

    def fits(self):
        """Fails if the page or a visible element of it is wider than the window."""
        wide = self.page.evaluate("""() => [...document.querySelectorAll("body, body *")].filter(
            each => each.checkVisibility() && !each.closest("pre, .table")
              && each.getBoundingClientRect().right > innerWidth).map(each => each.outerHTML)""")
        assert not wide, f"these are too wide: {wide}"
        for part in "html", "#view":
            wider = self.at(part).evaluate("part => part.scrollWidth - part.clientWidth")
            assert wider <= 0, f"{part} is {wider} pixels too wide"

    def close(self, complaints=0):
        assert not self.foreign, f"the page asks elsewhere: {self.foreign}"
        assert len(self.said) == complaints, f"the page complains: {self.said}"
        self.context.close()


def pictures(browser):
    """Attaches, pastes, drops and removes files. Checks the requests and the page."""
    view = Page(browser, viewport={"width": 400, "height": 800})
    asked = []

    def answer(route):
        asked.append(route.request.post_data_json["messages"])
        events = [{"choices": [{"delta": {"content": "A dot."}}]},
                  {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        route.fulfill(content_type="text/event-stream", body=body + "data: [DONE]\n\n")

    view.page.route("**/v1/chat/completions", answer)
    waiting = view.at("#pictures img")
    dot = {"name": "dot.png", "mimeType": "image/png", "buffer": DOT}
    view.at("#file").set_input_files([dot, {**dot, "name": "a.txt", "mimeType": "text/plain"}])
    expect(waiting).to_have_count(1)
    expect(view.at("#note")).to_contain_text("a.txt is no text file in UTF-8")
    view.button("Remove this picture").click()
    expect(waiting).to_have_count(0)
    for n, kind in enumerate(("paste", "drop"), 1):
        view.page.evaluate(HANDED, [kind, list(DOT)])
        expect(waiting).to_have_count(n)
    view.shot("pictures-400-light")
    view.fits()
    view.ask("What is this?")
    url = "data:image/png;base64," + base64.b64encode(DOT).decode()
    shown = {"type": "image_url", "image_url": {"url": url}}
    content = [shown, shown, {"type": "text", "text": "What is this?"}]
    assert asked[-1] == [{"role": "user", "content": content}], asked
    expect(waiting).to_have_count(0)
    expect(view.users.locator("img")).to_have_count(2)
    # The images stay in the chat, also after a reload.
    view.page.reload()
    view.ask("And this?")
    assert asked[-1][0]["content"] == content and len(asked[-1]) == 3, asked
    # An image needs no text.
    view.page.evaluate(HANDED, ["paste", list(DOT)])
    view.send.click()
    view.idle()
    assert asked[-1][-1] == {"role": "user", "content": [shown]}, asked
    # A text file comes before the message, in a fence that its text does not close.
    notes = {"name": "notes.md", "mimeType": "", "buffer": b"```\ntea\n```\n"}
    view.at("#file").set_input_files([notes, {**notes, "name": "not.md"}])
    view.button("Remove not.md").click()
    expect(view.button("Remove notes.md")).to_have_count(1)
    view.ask("When?")
    content = "notes.md:\n````\n```\ntea\n```\n````\n\nWhen?"
    assert asked[-1][-1] == {"role": "user", "content": content}, asked
    expect(view.users.last.locator("summary")).to_have_text("notes.md")
    view.page.reload()
    view.ask("Why?")
    assert asked[-1][-3]["content"] == content, asked
    view.close()


def talk(browser):
    """Checks typing, streams, figures, copy, retry, edit, stop, reload, and the list of chats."""
    view = Page(browser, viewport={"width": 900, "height": 800})
    page = view.page
    expect(view.at("#model")).not_to_have_text("gemma")
    model = page.request.get(f"{address}/v1/models").json()["data"][0]["id"]
    expect(view.at("#model")).to_have_text(model)
    # With the keyboard only: Shift+Enter begins a line.
    page.keyboard.type("Hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    expect(view.text).to_have_value("Hello\nthere")
    view.ask(FRANCE)
    expect(view.users).to_have_text([f"{FRANCE}Edit"])
    answer = view.answers.locator(".answer").inner_text()
    assert expected in answer, answer
    figures = view.answers.locator(".actions details")
    expect(figures.locator("div")).to_be_hidden()
    figures.locator("summary").click()
    expect(figures.locator("div")).to_have_text(FIGURES)
    view.button("Copy", view.answers).click()
    expect(view.button("Copied")).to_be_visible()
    assert view.clipboard().strip() == answer.strip(), view.clipboard()
    view.shot("talk-900-light")

    # A request contains the temperature, the system prompt and the chat so far.
    view.button("Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0")
    view.shot("settings-900-light")
    view.button("Close").click()
    with page.expect_request("**/v1/chat/completions") as request:
        view.ask("And of Spain?")
    body = request.value.post_data_json
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["system", "user", "assistant", "user"], roles
    assert body["messages"][0]["content"] == "Be brief." and body["temperature"] == 0, body
    # Retry is available for the last answer, and sends the same request: at temperature 0 the same
    # text.
    expect(view.button("Retry")).to_have_count(1)
    before = view.answers.last.locator(".answer").inner_text()
    with page.expect_request("**/v1/chat/completions") as request:
        view.button("Retry").click()
    view.idle()
    assert request.value.post_data_json == body, request.value.post_data
    expect(view.answers).to_have_count(2)
    assert view.answers.last.locator(".answer").inner_text() == before

    # Edited messages: Escape keeps the chat, Enter drops the messages after it.
    view.button("Edit", view.users.first).click()
    page.get_by_label("Edited message").fill("x")
    page.keyboard.press("Escape")
    expect(view.users.first).to_have_text(f"{FRANCE}Edit")
    expect(view.answers).to_have_count(2)
    view.button("Edit", view.users.first).click()
    expect(page.get_by_label("Edited message")).to_have_value(FRANCE)
    page.get_by_label("Edited message").fill("What is the capital of Italy?")
    page.keyboard.press("Enter")
    view.idle()
    expect(view.users).to_have_text(["What is the capital of Italy?Edit"])
    expect(view.answers).to_have_count(1)

    # A long answer arrives in parts, and Escape stops it. The text so far stays.
    view.begin_long()
    expect(view.answers.last).to_have_attribute("aria-busy", "true")
    page.keyboard.press("Escape")
    expect(view.send).to_have_text("Send", timeout=1_000)
    part = view.answers.last.locator(".answer").inner_text()
    assert part
    # Nothing more arrives, and the chat continues after that text.
    page.wait_for_timeout(300)
    assert view.answers.last.locator(".answer").inner_text() == part
    view.ask(FRANCE)
    assert view.answers.last.locator(".answer").inner_text(), "an answer after a stopped one"

    # A reload shows the same chat, with its settings.
    shown = view.at("#talk").inner_text()
    page.reload()
    expect(view.users).to_have_count(3)
    assert view.at("#talk").inner_text() == shown
    view.button("Settings").click()
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    expect(page.get_by_label("Temperature")).to_have_value("0")
    page.keyboard.press("Escape")

    # A second chat starts while an answer runs, which ends. Both stay, and one is deleted.
    view.begin_long()
    with page.expect_event("requestfailed"):
        view.button("New chat").click()
    expect(view.send).to_have_text("Send")
    expect(view.at("article")).to_have_count(0)
    view.ask("A second chat")
    titles = view.at("#list li button:first-child")
    expect(titles).to_have_text(["A second chat", "What is the capital of Italy?"])
    titles.last.click()
    expect(view.users).to_have_count(4)
    expect(titles.last).to_have_attribute("aria-current", "true")
    page.once("dialog", lambda dialog: dialog.dismiss())
    view.button("Delete A second chat").click()
    expect(titles).to_have_count(2)
    page.on("dialog", lambda dialog: dialog.accept())
    view.button("Delete What is the capital of Italy?").click()
    expect(titles).to_have_text(["A second chat"])
    expect(view.at("article")).to_have_count(0)
    page.reload()
    expect(titles).to_have_text(["A second chat"])
    expect(view.at("article")).to_have_count(0)
    view.close()


def narrow(browser):
    """Checks a window of 400 pixels: dark, not too wide, and a button for the list of chats."""
    view = Page(browser, viewport={"width": 400, "height": 700}, color_scheme="dark")
    view.ask(FRANCE)
    view.at(".actions summary").click()
    view.fits()
    dark = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(n => n < 64)"
    assert view.page.evaluate(dark), "the page is not dark"
    view.shot("talk-400-dark")
    expect(view.at("#list")).to_be_hidden()
    view.button("Chats").click()
    expect(view.at("#list")).to_be_visible()
    view.fits()
    view.shot("chats-400-dark")
    view.button("New chat").click()
    expect(view.at("#list")).to_be_hidden()
    view.button("Settings").click()
    view.fits()
    view.shot("settings-400-dark")
    view.page.keyboard.press("Escape")
    view.page.evaluate(SCRIPTED, {"text": MARKDOWN, "size": 1000})
    view.ask("Markdown")
    view.fits()
    table = view.at(".table").evaluate("table => table.scrollWidth > table.clientWidth")
    assert table, "a wide table breaks its words"
    view.shot("markdown-400-dark")
    view.button("Edit").click()
    view.fits()
    view.page.emulate_media(color_scheme="light")
    assert not view.page.evaluate(dark), "the page is always dark"
    view.close()


def named(browser):
    """Checks that each visible control has a name, and that its focus is visible."""
    view = Page(browser)
    view.ask(FRANCE)
    view.text.focus()
    names = set()
    for _ in range(20):
        view.page.keyboard.press("Tab")
        name, outline = view.page.evaluate("""() => {
          const { ariaLabel, innerText } = document.activeElement;
          return [ariaLabel ?? innerText, getComputedStyle(document.activeElement).outlineStyle];
        }""")
        if view.page.evaluate("document.activeElement === document.body"):
            continue
        assert name.strip() and outline != "none", (name, outline)
        names.add(name)
    wanted = {"Message", "Send", "New chat", FRANCE, f"Delete {FRANCE}", "Settings", "Edit", "Copy",
              "Retry", "Figures"}
    assert wanted <= names, wanted - names
    view.close()


def markdown(browser):
    """Checks that a fixed answer looks the same at once, in pieces and after a reload, and is
    safe."""
    view = Page(browser, viewport={"width": 900, "height": 1400})
    page, drawn = view.page, []
    expect(view.at("#model")).not_to_have_text("gemma")
    for size in 1, 7, 10_000:
        page.evaluate(SCRIPTED, {"text": MARKDOWN, "size": size})
        view.ask("Markdown")
        kept = view.answers.last.locator(".answer > [data-kept]")
        expect(kept).to_have_count(1)
        kept.evaluate("element => element.removeAttribute('data-kept')")
        drawn.append(view.answers.last.locator(".answer").inner_html())
        expect(view.answers.last.locator(".actions details")).to_have_text(
            re.compile(r"Figures312 tokens, [\d.]+ a second, first after [\d.]+ s, 57 tokens read"))
        page.reload()
        expect(view.answers.locator(".answer").last).not_to_be_empty()
        drawn.append(view.answers.last.locator(".answer").inner_html())
    assert len(set(drawn)) == 1, set(drawn)

    answer = view.answers.last.locator(".answer")
    for selector, texts in {
        "> h2": ["A plan for gemma"],
        "> h3": ["Injection"],
        "em": ["italic", "this too", "both"],
        "strong": ["bold with code", "both", "Install:"],
        "> p > code, strong > code, h2 > code": ["gemma", "code"],
        "a": ["a link", "https://example.org/x_y_z", "image"],
        "> ol > li > p": ["Install: it is quick.", "Try:", "Done."],
        "> ol > li:nth-child(2) > ul > li > p": ["first", "second"],
        "ul ul > li": ["deepest"],
        "li .code code": ["echo '<b>*no emphasis*</b>'   "
                          "# a comment that is wider than a window of four hundred pixels"],
        "blockquote > p": ["A quote\nof two lines"],
        "th": ["size", "tokens a second"],
        "td:first-child": ["a", "a|b"],
        "> hr + p": ["Roses are red,\nviolets are blue."],
        "> .code:last-child code": ["<img src=x onerror=\"document.title='hacked'\">\n"],
    }.items():
        found = answer.locator(":scope " + selector).all_text_contents()
        assert found == texts, f"{selector}: {found}"
    assert "snake_case_names, 2*3*4, *plain*," in answer.inner_text()

    # No part of the answer becomes HTML, and links lead only to the web.
    assert view.at("#talk :is(img, script, iframe, i, [onerror])").count() == 0
    assert page.title() != "hacked"
    links = answer.locator("a").evaluate_all("all => all.map(a => [a.href, a.rel, a.target])")
    assert [href for href, _, _ in links] == [
        "https://example.org/a_(b)", "https://example.org/x_y_z", "https://example.org/i.png"]
    assert all(rest == ["noopener noreferrer", "_blank"] for _, *rest in links), links
    for text in "[click](javascript:alert(1))", "<script>document.title = 'hacked'</script>":
        expect(answer).to_contain_text(text)

    # The thought is folded, and code is copied unchanged.
    thought = view.answers.last.locator("> details")
    expect(thought.locator("div")).to_be_hidden()
    thought.locator("summary").click()
    expect(thought.locator("div")).to_have_text("<i>Hm")
    answer.get_by_role("button", name="Copy code").first.click()
    assert view.clipboard().startswith("echo '<b>*no emphasis*</b>'"), view.clipboard()
    view.button("Copy", view.answers.last).click()
    assert view.clipboard() == MARKDOWN
    view.answers.last.scroll_into_view_if_needed()
    view.shot("markdown-900-light")

    # Deep nesting and open markers are shown as text, and the page still responds.
    page.evaluate(SCRIPTED, {"size": 100_000, "text":
                  ">" * 9_000 + "a\n\n" + "- " * 9_000 + "b\n\n" + "**a *b `c [" * 9_000 + "end"})
    view.ask("Hostile")
    expect(view.answers.last.locator(".answer > p")).to_contain_text("end")
    view.close()


def errors(browser):
    """Checks messages of the server: loading, too many requests, a lost connection, a key."""
    view = Page(browser)
    page = view.page
    expect(view.at("#model")).not_to_have_text("gemma")

    def reply(status, body):
        return lambda route: route.fulfill(status=status, body=json.dumps(body))

    def refuse(status, message):
        return reply(status, {"error": {"message": message}})

    chat, models = "**/v1/chat/completions", "**/v1/models"
    page.route(chat, refuse(429, "128 texts are waiting"))
    view.ask("Busy?")
    expect(view.answers.locator(".error")).to_have_text("128 texts are waiting")
    page.unroute(chat)
    page.route(chat, lambda route: route.abort())
    view.button("Retry").click()
    expect(view.answers.locator(".error")).to_contain_text("The server does not answer")
    page.unroute(chat)
    page.route(chat, lambda route: route.fulfill(
        body='data: {"choices": [{"delta": {"content": "It is **ha"}}]}\n\n'))
    view.button("Retry").click()
    expect(view.answers.locator(".answer")).to_have_text("It is **ha")
    expect(view.answers.locator(".error")).to_contain_text("The server does not answer")
    page.unroute(chat)
    page.route(chat, refuse(400, "no"))
    view.ask("A failed question")
    page.unroute(chat)
    # A failed question is left out of the next request; a partial answer is not.
    with page.expect_request(chat) as request:
        view.ask(FRANCE)
    sent = [message["content"] for message in request.value.post_data_json["messages"]]
    assert sent == ["Busy?", "It is **ha", FRANCE], sent
    expect(view.answers.last.locator(".error")).to_be_hidden()

    # While the model loads, the page waits for it.
    page.route(models, refuse(503, "the model is being loaded"))
    page.reload()
    expect(view.at("#note")).to_have_text("the model is being loaded")
    expect(view.at("#model")).to_have_text("gemma")
    page.unroute(models)
    expect(view.at("#model")).not_to_have_text("gemma", timeout=10_000)
    expect(view.at("#note")).to_be_hidden()

    # Another server's name, and whether it is called a demo.
    for name, is_demo in {"gemma-demo": True, "bundled demo": True, "gemma-3-27b": False}.items():
        page.route(models, reply(200, {"data": [{"id": name}]}))
        page.reload()
        expect(view.at("#model")).to_have_text(name)
        expect(view.at("#demo")).to_be_visible(visible=is_demo)
        page.unroute(models)

    # A server with keys: the dialog shows its text, and later requests contain the key.
    def keyed(route):
        if route.request.headers.get("authorization") == "Bearer secret":
            return route.continue_()
        return refuse(401, "an API key is needed")(route)

    page.route("**/v1/**", keyed)
    page.reload()
    expect(view.at("#why")).to_have_text("an API key is needed")
    key = page.get_by_label("API key")
    expect(key).to_be_focused()
    page.keyboard.type("secret")
    page.keyboard.press("Enter")
    expect(view.at("#settings")).to_be_hidden()
    expect(view.at("#model")).not_to_have_text("gemma")
    view.ask(FRANCE)
    expect(view.answers.last.locator(".answer")).not_to_be_empty()
    page.reload()
    expect(view.at("#model")).not_to_have_text("gemma")
    stored = page.evaluate("JSON.stringify(localStorage)")
    assert "secret" not in stored, "the key is in the lasting storage"
    # Chromium reports each refusal and lost connection: 429, abort, 400, 503s and 401s.
    assert all("Failed to load resource" in text for text in view.said), view.said
    view.close(complaints=len(view.said))


def storage(browser):
    """Checks a refused, a full and a damaged storage: the page reports it if needed, and works."""
    refused = """for (const name of ["localStorage", "sessionStorage"]) {
      Object.defineProperty(window, name, { get() { throw new DOMException("refused"); } });
    }"""
    full = "Storage.prototype.setItem = () => { throw new DOMException('full'); };"
    for script in refused, full:
        view = Page(browser, script)
        view.ask(FRANCE)
        expect(view.answers.locator(".answer")).not_to_be_empty()
        expect(view.at("#note")).to_contain_text("refused or full")
        view.button("New chat").click()
        view.ask("A second chat")
        titles = view.at("#list li button:first-child")
        expect(titles).to_have_text(["A second chat", FRANCE])
        titles.last.click()
        expect(view.users).to_have_text([f"{FRANCE}Edit"])
        view.close()
    view = Page(browser, """localStorage.setItem("gemma.chat.a", "{");
      localStorage.setItem("gemma.chat.b", '{"id": "b"}'); localStorage.setItem("other", "1");""")
    view.ask(FRANCE)
    expect(view.at("#list li")).to_have_count(1)
    view.close()


with sync_playwright() as playwright:
    started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
    for case in talk, pictures, narrow, named, markdown, errors, storage:
        case(started)
        print(f"{case.__name__}: as expected")
    started.close()
