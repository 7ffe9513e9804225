"""The system's browser with the network cut, and a way to open a page in it that asserts silence."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium here: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        instance = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield instance
        instance.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Any]:
    """Opens a file and, at the end, asserts that it asked for nothing else and complained about nothing."""
    contexts, asked, complaints = [], [], []

    def opened(path: Path, **options: Any) -> Page:
        context = browser.new_context(offline=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(f"dialog {dialog.message}"))
        page.goto(path.as_uri())
        asked[:] = [url for url in asked if url != path.as_uri() and not url.startswith("data:")]
        return page

    yield opened
    for context in contexts:
        context.close()
    assert asked == []
    assert complaints == []
