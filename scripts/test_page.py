"""Tries the page of a server in headless Chromium: typed, streamed, stopped, narrow.

test_page.py http://ADDRESS EXPECTED [CHROMIUM]        EXPECTED is the answer to the first question
"""

import sys

from playwright.sync_api import expect, sync_playwright

address, expected = sys.argv[1:3]
chromium = sys.argv[3] if len(sys.argv) > 3 else None
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 400, "height": 700})
    said, foreign = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: foreign.append(request.url)
            if not request.url.startswith(address) else None)
    page.goto(address)
    expect(page.locator("#model")).not_to_have_text("gemma")
    page.locator("#text").fill("What is the capital of France?")
    page.locator("#text").press("Enter")
    expect(page.locator("#figures")).to_contain_text("tokens read", timeout=60_000)
    expect(page.locator("article.user")).to_have_text("What is the capital of France?")
    answer = page.locator("article.assistant").inner_text()
    assert answer, "an answer is shown"
    # Sampled or not, the bundled model knows this one.
    assert expected in answer, answer

    # Nothing of an answer is HTML.
    page.locator("#text").fill("<img src=x onerror=document.title='hacked'>")
    page.locator("#send").click()
    expect(page.locator("#send")).to_have_text("Send", timeout=60_000)
    assert page.title() != "hacked" and page.locator("article img").count() == 0

    # A long answer comes in parts and is stopped.
    page.locator("#reset").click()
    expect(page.locator("article")).to_have_count(0)
    page.locator("#text").fill("Write a very long story about a house by the sea.")
    page.locator("#send").click()
    expect(page.locator("#send")).to_have_text("Stop")
    expect(page.locator("article.assistant")).not_to_be_empty()
    page.locator("#send").click()
    expect(page.locator("#send")).to_have_text("Send")
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 400, f"the page is {width} wide"
    assert not foreign, f"the page asks elsewhere: {foreign}"
    assert not said, f"the page complains: {said}"
    browser.close()
print("the page: as expected")
