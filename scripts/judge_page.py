"""The page in a real browser: python scripts/judge_page.py BASE_URL CHROMIUM CHROMEDRIVER [FOLDER]

The server at BASE_URL says what the last message has between « and », a token each 20 ms (tests/serve/page.rs). Each check
is one function. With FOLDER, screenshots are left there.
"""

import json
import re
import sys
import tempfile
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

BASE, CHROMIUM, DRIVER = sys.argv[1:4]
SHOTS = Path(sys.argv[4]) if len(sys.argv) > 4 else None
LONG = " ".join(f"line {i} of a long answer," for i in range(60))

profile = tempfile.TemporaryDirectory()
options = webdriver.ChromeOptions()
options.binary_location = CHROMIUM
for flag in [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--no-proxy-server", "--window-size=1200,800",
    f"--user-data-dir={profile.name}",
]:
    options.add_argument(flag)
options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))


def all_of(selector):
    return driver.find_elements(By.CSS_SELECTOR, selector)


def one(selector):
    return driver.find_element(By.CSS_SELECTOR, selector)


def until(what, holds, seconds=20):
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, f"it never came that {what}"
        time.sleep(0.02)
    return found


def running():
    return driver.execute_script("return document.querySelector('#engines .counts dd')?.textContent")


def fresh():
    driver.get(BASE)
    until("the server is well", lambda: one("#state").text == "ok")
    until("the models are there", lambda: [o.text for o in Select(one("#model")).options] == ["tiny"])


def press(*keys):
    ActionChains(driver).send_keys(*keys).perform()


def say(text):
    lines = text.replace("\n", Keys.SHIFT + Keys.ENTER + Keys.NULL)
    one("#text").send_keys(f"Say «{lines}»" + Keys.ENTER)


def last():
    return all_of("article.assistant")[-1]


def figures():
    read = "return [...arguments[0].querySelectorAll('[data-figure]')].map(f => [f.dataset.figure, f.lastChild.textContent])"
    return dict(driver.execute_script(read, last()))


def ended():
    until("the answer ended", lambda: one("#send").text == "Send" and last().get_attribute("aria-busy") == "false")


def text_of_last():
    return last().find_element(By.CSS_SELECTOR, ".body").text


def emulate(scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def shot(name):
    if SHOTS:
        driver.save_screenshot(str(SHOTS / f"{name}.png"))


def check_an_answer_streams_and_says_where_it_came_from():
    fresh()
    say(LONG)
    seen = set()
    until("text streams", lambda: seen.add(len(text_of_last())) or len(seen) > 5)
    assert last().get_attribute("aria-busy") == "true"
    assert figures()["route"].startswith("fake: "), "the route is there while the answer is written"
    until("a long answer has more than one sight", lambda: len(text_of_last()) > 100)
    until("the live view shows it", lambda: running() == "1")
    one("#text").send_keys(Keys.ESCAPE)
    ended()
    # What was stopped is not kept; what was answered is.
    for text in ["All is well.", "And again."]:
        say(text)
        ended()
        assert text_of_last() == text
    shown = figures()
    assert re.fullmatch(r"\d+ ms", shown["ttft"]) and re.fullmatch(r"[\d.]+ tok/s", shown["speed"]), shown
    assert shown["route"].startswith("fake: ") and int(shown["cached"]) > 0, shown
    assert int(shown["tokens"]) > 2 and shown["end"] == "stop", shown


def check_code_is_set_apart():
    fresh()
    say("Here:\n```python\nx = [1]\n```\nDone.")
    ended()
    assert last().find_element(By.TAG_NAME, "pre").text == "x = [1]"


def check_stop():
    fresh()
    say(LONG)
    until("text streams", lambda: len(text_of_last()) > 20)
    one("#send").click()
    ended()
    assert figures()["end"] == "stopped"
    said = text_of_last()
    time.sleep(0.3)
    assert text_of_last() == said and len(said) < len(LONG)
    until("nothing runs", lambda: running() == "0")


def check_a_refusal_is_shown_and_forgotten():
    fresh()
    one("#max_tokens").send_keys("9999999")
    say("x")
    alert = until("it is refused", lambda: all_of("article [role=alert]"))[0]
    assert "context" in alert.text and "8192" in alert.text, alert.text
    shot("refused")
    one("#max_tokens").clear()
    say("y")
    ended()
    assert text_of_last() == "y"
    one("#temperature").send_keys("-1")
    say("z")
    assert len(all_of("article.assistant")) == 2, "a wrong setting is not sent"


def check_settings_reach_the_server():
    fresh()
    one("#max_tokens").send_keys("3")
    one("#seed").send_keys("7")
    one("#system").send_keys("Be brief.")
    Select(one("#engine")).select_by_value("fake")
    say("a long text that is cut")
    ended()
    shown = figures()
    assert (shown["tokens"], shown["end"], shown["seed"]) == ("3", "length", "7"), shown
    sent = [json.loads(r["postData"]) for r in requests() if r["url"].endswith("/v1/chat/completions")][-1]
    assert sent["engine"] == "fake" and sent["messages"][0] == {"role": "system", "content": "Be brief."}, sent


def check_new_chat():
    fresh()
    say("one")
    ended()
    one("#reset").click()
    assert not all_of("article") and one("#empty").is_displayed()
    assert driver.switch_to.active_element == one("#text")


def check_the_keyboard_is_enough():
    fresh()
    assert driver.switch_to.active_element == one("#text")
    press("Say «by keys»", Keys.ENTER)
    ended()
    assert text_of_last() == "by keys"
    driver.execute_script("document.querySelector('#model').focus()")
    seen = []
    for _ in range(30):
        element = driver.switch_to.active_element
        outline = element.value_of_css_property("outline-style")
        inside = element.find_element(By.XPATH, "..").get_attribute("id") if element.tag_name == "summary" else ""
        name = element.get_attribute("id") or element.tag_name + inside
        assert outline != "none" or name == "body", f"{name} does not show that it has the focus"
        if name in seen:
            break
        seen.append(name)
        press(Keys.TAB)
    for name in ["model", "engine", "reset", "log", "text", "send", "temperature", "seed", "system", "key"]:
        assert name in seen, (name, seen)


def check_everything_has_a_name():
    fresh()
    say("x")
    ended()
    nodes = driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = {"textbox", "button", "combobox", "spinbutton", "meter", "log", "ComboBoxMenuList"}
    nameless = [n["role"]["value"] for n in nodes if not n.get("ignored") and n.get("role", {}).get("value") in roles and not n.get("name", {}).get("value")]
    assert not nameless, nameless
    assert one("#log").get_attribute("role") == "log" and one("#state").get_attribute("role") == "status"


def luminance(color):
    parts = [int(v) / 255 for v in re.findall(r"\d+", color)[:3]]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def check_dark_and_light_can_be_read():
    papers = {}
    for scheme in ["light", "dark"]:
        emulate(scheme)
        fresh()
        say("Two roads diverged in a wood, and I took the one less traveled by.")
        ended()
        say("Here is how:\n```\ntandem serve smollm2\n```\nThat is all.")
        ended()
        until("the live view is there", lambda: all_of(".engine meter"))
        shot(scheme)
        contrast = """
            const paper = element => { for (; element; element = element.parentElement) {
                const color = getComputedStyle(element).backgroundColor;
                if (!/, 0\\)|transparent/.test(color)) return color; } };
            return [...document.querySelectorAll('h1, label span, .body, dt, dd, #keys, .role, #state, button, .engine p, summary, .body pre')]
                .map(e => [e.tagName + '.' + e.className, getComputedStyle(e).color, paper(e)]);"""
        for what, ink, paper in driver.execute_script(contrast):
            a, b = sorted([luminance(ink), luminance(paper)])
            assert (b + 0.05) / (a + 0.05) >= 4.5, f"{scheme}: {what} {ink} on {paper}"
        papers[scheme] = luminance(one("body").value_of_css_property("background-color"))
    assert papers["light"] > 0.8 and papers["dark"] < 0.05, papers
    emulate("light")


def check_a_phone_is_wide_enough():
    metrics = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        fresh()
        say("Short lines, " * 20 + "x" * 80)
        ended()
        shot("phone")
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 360
        assert one("#text").is_displayed() and one("#send").is_displayed()
        one("#settings summary").click()
        assert one("#temperature").is_displayed()
        shot("phone-settings")
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 360
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


sent = []


def requests():
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            sent.append(message["params"]["request"])
    return sent


def check_nothing_else_was_asked_or_went_wrong():
    urls = {request["url"] for request in requests()}
    foreign = [url for url in urls if not url.startswith((f"{BASE}/", "data:", "chrome:", "chrome-untrusted:"))]
    assert urls and not foreign, foreign
    complaints = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE" and "400" not in entry["message"]]
    assert not complaints, complaints


try:
    driver.execute_cdp_cmd("Network.enable", {})
    emulate("light")
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
            print("ok", name.removeprefix("check_"), flush=True)
except BaseException:
    shot("failed")
    raise
finally:
    driver.quit()
    profile.cleanup()
