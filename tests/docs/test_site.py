"""The site builds without a warning, without other hosts, and forgets no public name.

A browser shows it on a phone and on a desktop, light and dark.
"""

import importlib.util
import io
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urldefrag

import numpy as np
import pytest
from PIL import Image

from tests.unit.test_public_names import MODULES, PUBLIC

from .documents import PAGES, ROOT

spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/site_hooks.py")
site_hooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site_hooks)


def test_the_reference_has_every_public_name_once():
    text = "\n".join(site_hooks.reference_pages().values())
    shown = re.findall(
        r"^from speechbrain_rev\.(\S+) import (\S+)$", text, re.MULTILINE
    )
    expected = [(m, n) for m, names in {**PUBLIC, **MODULES}.items() for n in names]
    assert sorted(shown) == sorted(expected)
    assert len(re.findall(r"^::: ", text, re.MULTILINE)) == len(expected)


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [p.name for p in PAGES if f": {p.name}\n" not in navigation] == []


def test_links_are_led_to_where_documents_are_on_the_site():
    text = "[a](docs/x.md#b) ![c](docs/d.png) [e](hparams/train.yaml) [f](#g) [h](http://i)"
    assert site_hooks.led_to_the_site(text, "README.md") == (
        "[a](x.md#b) ![c](d.png) [e](hparams/train.yaml) [f](#g) [h](http://i)"
    )
    assert site_hooks.led_to_the_site(
        "[a](../../docs/x.md)", "recipes/VoxCeleb/README.md"
    ) == ("[a](../../x.md)")
    assert (
        site_hooks.led_to_the_site("[a](../README.md)", "docs/x.md") == "[a](index.md)"
    )


def test_options_in_text_stay_in_one_piece_and_blocks_of_code_as_they_are():
    block, long = "<pre><code>--card</code></pre>", f"<code>--{'x' * 30}</code>"
    text = "<code>plan --card 11GB</code>"
    assert site_hooks.options_whole(text + block + long) == (
        f'<code>plan <span class="word">--card</span> 11GB</code>{block}{long}'
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    made = subprocess.run(
        [*command, "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    """List the pages of the site."""
    return sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))


ASKED = (
    r'<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)="?(?:https?:)?//[^>]*>'
)


@pytest.mark.slow
def test_the_site_builds_renders_everything_and_asks_no_other_host(site):
    built = {path.name for path in site.glob("*.html")}
    assert {"index.html", *(f"{page.stem}.html" for page in PAGES)} <= built
    for path in site.rglob("*.html"):
        html = path.read_text()
        asked = [tag for tag in re.findall(ASKED, html) if "canonical" not in tag]
        assert asked == [], path.name
        # What markdown does not understand is left in a paragraph as it was written.
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", html, flags=re.DOTALL)
        assert not re.search(r"```|<p>\||:func:", text), path.name


PHONE, DESKTOP = 390, 1280
#: Contrast of text that WCAG 2 asks for (AA).
LEGIBLE = 4.5
PAGE_JS = (ROOT / "tests/docs/page.js").read_text()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@dataclass(frozen=True)
class Browser:
    """A browser that is at the site."""

    driver: object
    address: str

    def open(self, page="index.html", *, width=DESKTOP, scheme="light"):
        """Open a page in a window of that width, on a system of that scheme."""
        self.resize(width)
        self.prefer(scheme)
        self.driver.get(self.address + page)

    def forget(self):
        """Forget what was chosen and reported before."""
        self.open()
        self.driver.execute_script("localStorage.clear()")
        self.errors()

    def resize(self, width):
        size = {"width": width, "height": 844, "deviceScaleFactor": 1}
        size["mobile"] = width == PHONE
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        media = {"features": [feature]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)

    def ask(self, expression):
        """Evaluate an expression of page.js."""
        return self.driver.execute_script(f"{PAGE_JS}\nreturn {expression}")

    def errors(self):
        """List what the console reported as an error since it was last asked."""
        logged = self.driver.get_log("browser")
        return [e["message"] for e in logged if e["level"] == "SEVERE"]

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def wait(self, condition):
        """Wait until that is true; what cannot be found or clicked yet is no failure."""
        from selenium.common.exceptions import WebDriverException
        from selenium.webdriver.support.ui import WebDriverWait

        wait = WebDriverWait(self.driver, 20, ignored_exceptions=[WebDriverException])
        wait.until(lambda _: condition())


@pytest.fixture(scope="module")
def browser(site):
    """Start Debian's chromium, and serve the site on this machine."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is missing")
    from selenium.webdriver.chrome.service import Service

    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        pytest.skip("chromium and chromium-driver, as Debian has them, are missing")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    # Containers and CI run as root, for whom chromium has no sandbox.
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage"):
        options.add_argument(f"--{argument}")
    options.add_argument("--no-proxy-server")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    handler = partial(_Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        driver = webdriver.Chrome(options, Service(programs[1]))
        try:
            yield Browser(driver, f"http://127.0.0.1:{server.server_port}/")
        finally:
            driver.quit()
            server.shutdown()


@pytest.fixture
def fresh(browser):
    """The browser as of someone who has not been at the site."""
    browser.forget()
    return browser


@dataclass(frozen=True)
class Seen:
    """What a browser shows of a page whose folded blocks are open."""

    flaws: dict
    links: list
    anchors: set


def see(browser, page, width, scheme):
    browser.open(page, width=width, scheme=scheme)
    folded = browser.ask("unfold()")
    pictures, others = browser.ask(f"pictures({width})")
    flaws = {
        "stays folded": folded,
        "cut off": browser.ask(f"cutOff({width})"),
        "bad pictures": others,
        "faint": browser.ask(f"faint({LEGIBLE})"),
        "pictures unlike the page": [
            image.get_attribute("src")
            for image in pictures
            if is_light(image) != (scheme == "light")
        ],
        "errors": browser.errors(),
    }
    flaws = {flaw: what for flaw, what in flaws.items() if what}
    return Seen(flaws, browser.ask("links()"), set(browser.ask("anchors()")))


def is_light(element):
    shot = Image.open(io.BytesIO(element.screenshot_as_png)).convert("L")
    return np.median(shot) > 128


@pytest.fixture(scope="module")
def phone(browser, pages):
    """Open every page on a phone that is light."""
    browser.forget()
    return {page: see(browser, page, PHONE, "light") for page in pages}


@pytest.fixture(scope="module")
def desktop(browser, pages):
    """Open every page on a desktop that is dark."""
    browser.forget()
    return {page: see(browser, page, DESKTOP, "dark") for page in pages}


@pytest.mark.slow(drawn=False)
def test_pages_are_whole_and_legible_and_report_no_error(phone, desktop):
    seen = {f"{page}, phone": shown.flaws for page, shown in phone.items()}
    seen |= {f"{page}, desktop": shown.flaws for page, shown in desktop.items()}
    assert {page: flaws for page, flaws in seen.items() if flaws} == {}


@pytest.mark.slow(drawn=False)
def test_links_lead_to_pages_and_anchors_of_the_site(phone, browser, site):
    broken = set()
    for page, shown in phone.items():
        for link in shown.links:
            address, anchor = urldefrag(link)
            if not address.startswith(browser.address):
                continue
            path = unquote(address.removeprefix(browser.address)) or "index.html"
            path += "index.html" * path.endswith("/")
            there = (site / path).is_file()
            if not there or (anchor and unquote(anchor) not in phone[path].anchors):
                broken.add(f"{page}: {link.removeprefix(browser.address)}")
    assert broken == set()


@pytest.mark.slow
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_search_finds_a_page_that_explains_first_and_opens_it(fresh, width):
    fresh.open("compression.html", width=width)
    if width == PHONE:
        fresh.find("label.md-header__button[for=__search]").click()
    field = fresh.find("[data-md-component=search-query]")
    fresh.wait(field.is_displayed)
    field.send_keys("chunk")
    first = ".md-search-result__item .md-search-result__link"

    def opened():
        left = "compression.html" not in fresh.driver.current_url
        return left or fresh.find(first).click()

    fresh.wait(opened)
    assert not fresh.driver.current_url.startswith(f"{fresh.address}reference/")
    assert "chunk" in fresh.find("article").text.lower()
    assert fresh.errors() == []


@pytest.mark.slow
def test_pages_are_as_light_or_dark_as_the_system_until_the_button_is_pressed(fresh):
    def scheme():
        return fresh.find("body").get_attribute("data-md-color-scheme")

    def press():
        fresh.find("[data-md-component=palette] label:not([hidden])").click()

    for system, expected in {"dark": "slate", "light": "default"}.items():
        fresh.open(scheme=system)
        assert scheme() == expected
    fresh.prefer("dark")
    fresh.wait(lambda: scheme() == "slate")  # while the page is open
    press()
    fresh.wait(lambda: scheme() == "default")
    fresh.open("compression.html", scheme="dark")
    assert scheme() == "default"
    press()
    fresh.wait(lambda: scheme() == "slate")
    fresh.open(scheme="light")
    assert scheme() == "slate"
    press()
    fresh.wait(lambda: scheme() == "default")
    fresh.prefer("dark")
    fresh.wait(lambda: scheme() == "slate")
    assert fresh.errors() == []
