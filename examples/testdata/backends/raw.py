"""Takes any method, and a path by the bytes at its beginning."""
import http.server
import sys


ANSWER = b'{"usage": {"prompt_tokens": 1000, "completion_tokens": 7000, "total_tokens": 8000}}'


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __getattr__(self, name):
        if name.startswith("do_"):
            return self.serve
        raise AttributeError(name)

    def serve(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        while "X-Hold" in self.headers and self.rfile.read(1):
            pass  # runs until its client leaves
        names = [n for n in ("health", "login", "graphql", "burst", "files", "checkout") if self.path.startswith("/" + n)]
        name = names[0] if names and (names != ["health"] or self.path == "/health") else "work"
        name = "models" if self.path == "/v1/models" else name
        is_guess = name == "login" and "Authorization" in self.headers
        if name == "login" and not is_guess and self.command in ("GET", "HEAD", "OPTIONS"):
            name = "form"
        self.send_response(401 if is_guess else 200)
        self.send_header("X-Served", name)
        self.send_header("X-Cost", "7")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(ANSWER)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(ANSWER)

    def log_message(self, *args):
        pass


http.server.ThreadingHTTPServer.request_queue_size = 256
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
