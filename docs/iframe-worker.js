/* The theme searches in a worker, which browsers refuse to pages that were opened from a folder. There, this takes its
   place: the worker's script runs in a hidden frame. The theme's plugin for offline sites looks for this file's name. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html>";
      this.inner = new Promise((resolve) => {
        frame.onload = () => {
          const inner = frame.contentWindow;
          inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inner.document.createElement("script");
          script.src = url;
          script.onload = () => resolve(inner);
          inner.document.body.append(script);
        };
      });
      document.body.append(frame);
    }

    async postMessage(data) {
      const inner = await this.inner;
      inner.dispatchEvent(new inner.MessageEvent("message", { data }));
    }
  };
}
