// What a browser shows of a page of the site; tests/docs/test_site.py calls these.

const ARTICLE = ".md-content article";
const all = (selector) => [...document.querySelectorAll(selector)];
const named = (element) =>
  `${element.tagName} ${element.textContent.trim().replace(/\s+/g, " ").slice(0, 60)}`;

// Fold out what is folded, as a click does, and list what stays closed.
function unfold() {
  const folded = all(`${ARTICLE} details`);
  for (const block of folded) if (!block.open) block.querySelector("summary").click();
  return folded
    .filter((block) => !block.open || !block.lastElementChild.checkVisibility())
    .map(named);
}

// List what is cut off at the right: what neither fits nor is within what scrolls.
function cutOff(width) {
  const out = (element) => element.getBoundingClientRect().right > width + 1;
  const scrolled = (element) => {
    for (let e = element; e.matches(`${ARTICLE} *`); e = e.parentElement)
      if (["auto", "scroll"].includes(getComputedStyle(e).overflowX) && !out(e)) return true;
    return false;
  };
  const wide = all(`${ARTICLE} *`).filter(
    (element) => element.checkVisibility() && out(element) && !scrolled(element),
  );
  if (document.documentElement.scrollWidth > width) wide.push(document.documentElement);
  return wide.map(named);
}

// Pictures that were loaded, are no wider than the page, and open in full size; and others.
function pictures(width) {
  const good = (image) =>
    image.naturalWidth &&
    image.getBoundingClientRect().width <= width &&
    image.closest("a")?.href === image.src;
  const images = all(`${ARTICLE} img`);
  return [images.filter(good), images.filter((image) => !good(image)).map((i) => i.src)];
}

const links = () => all("a[href]").map((link) => link.href);
const anchors = () => all("[id]").map((element) => element.id);

// Colours are composed as the browser does it: painted one over the other.
const paint = Object.assign(document.createElement("canvas"), { width: 1, height: 1 })
  .getContext("2d", { willReadFrequently: true });

function luminance(colours) {
  for (const colour of colours) {
    paint.fillStyle = colour;
    paint.fillRect(0, 0, 1, 1);
  }
  const [r, g, b] = [...paint.getImageData(0, 0, 1, 1).data.slice(0, 3)]
    .map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// The contrast of a text with what is behind it, as WCAG 2 defines it.
function contrast(element) {
  const behind = [];
  for (let e = element; e; e = e.parentElement)
    behind.unshift(getComputedStyle(e).backgroundColor);
  const back = luminance(["white", ...behind]);
  const text = luminance(["white", ...behind, getComputedStyle(element).color]);
  return (Math.max(back, text) + 0.05) / (Math.min(back, text) + 0.05);
}

// List texts that stand out less than that.
function faint(least) {
  const own = (element) =>
    [...element.childNodes].some((n) => n.nodeType === Node.TEXT_NODE && n.data.trim());
  return all(`${ARTICLE} *`)
    .filter((element) => own(element) && element.checkVisibility())
    .filter((element) => !element.matches(".headerlink") && contrast(element) < least)
    .map((element) => `${contrast(element).toFixed(2)} ${named(element)}`);
}
