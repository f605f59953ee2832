//go:build build

// Package build builds Caddy as users do, from the last commit, and runs what comes out. Its
// build tag keeps it out of `go test ./...`, because a first build takes minutes; `make contrib`
// runs it. It needs git, and starts no container.
package build

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/module"
	"golang.org/x/mod/zip"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

const path = "github.com/shardlimit/caddy-shardlimit"

var must = caddytest.Must

func want[T comparable](what string, got, want T) error { return caddytest.Want(what, got, want) }

// buildFlags are those of xcaddy but for -trimpath.
const buildFlags = "-ldflags '-w -s' -tags nobadger,nomysql,nopgx"

// modules are what list-modules has of the limiter.
const modules = `admin.api.rate_limit
http.handlers.rate_limit
rate_limit
rate_limit.stores.memory
rate_limit.stores.redis
`

// TestBuild runs the README's command with the newest Caddy, and with the oldest Go and Caddy that
// go.mod allows, and then what that builds. The builds do not run in parallel, because each
// finds in Go's cache what an earlier one has compiled.
func TestBuild(t *testing.T) {
	t.Parallel()
	root := clone(t)
	readme := read(t, root, "README.md")
	command := find(t, readme, `\n(xcaddy build .*)\n`)[1]
	must(t, "the Dockerfile", want("running the README's command", strings.Contains(read(t, root, "contrib/docker/Dockerfile"), "\nRUN "+command+"\n"), true))
	needs := read(t, root, "go.mod")
	oldestGo, oldestCaddy := "go"+find(t, needs, `\ngo (\S+)\n`)[1], find(t, needs, `\n\tgithub\.com/caddyserver/caddy/v2 (\S+)\n`)[1]

	bin := t.TempDir()
	run(t, root, nil, "go", "build", "-o", bin, "github.com/caddyserver/xcaddy/cmd/xcaddy")
	proxy, version := pack(t, root)
	cache := goEnv(t, "GOMODCACHE")
	t.Cleanup(func() { must(t, "forget the module", forget(cache, version)) })
	env := append(os.Environ(),
		"PATH="+bin+string(os.PathListSeparator)+os.Getenv("PATH"),
		"GOPROXY=file://"+proxy+","+goEnv(t, "GOPROXY"),
		// No checksum database knows the commit.
		"GONOSUMDB="+strings.Trim(goEnv(t, "GONOSUMDB")+","+path, ","),
		"CGO_ENABLED=0",
		// As by default but for -trimpath, with which Go would compile Caddy once more than for the tests.
		"XCADDY_GO_BUILD_FLAGS="+buildFlags,
	)
	for _, c := range []struct {
		name, command string
		env           []string
		built         string // what build-info has to say
	}{
		{"newest", command, nil, "\ndep\t" + path + "\t" + version + "\t"},
		{
			"oldest", strings.Replace(command, "build", "build "+oldestCaddy, 1), []string{"GOTOOLCHAIN=" + oldestGo},
			"go\t" + oldestGo + "\n.*\ndep\tgithub.com/caddyserver/caddy/v2\t" + oldestCaddy + "\t.*\ndep\t" + path + "\t" + version + "\t",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, start := t.TempDir(), time.Now()
			run(t, dir, append(env, c.env...), "bash", "-c", c.command)
			t.Logf("%s: %.0f s", c.command, time.Since(start).Seconds())
			caddy := filepath.Join(dir, "caddy")
			find(t, run(t, dir, nil, caddy, "build-info"), `(?s)`+c.built)
			var listed strings.Builder
			for line := range strings.Lines(run(t, dir, nil, caddy, "list-modules")) {
				if strings.Contains(line, "rate_limit") {
					listed.WriteString(line)
				}
			}
			must(t, "the limiter", want("modules", listed.String(), modules))
			limits(t, caddy, filepath.Join(root, "Caddyfile.example"))
			validate(t, caddy, root)
		})
	}
	t.Run("tagged", func(t *testing.T) { tagged(t, root) })
}

// limits loads a Caddyfile as JSON through the admin API, and spends the limit of its zone.
func limits(t *testing.T, caddy, caddyfile string) {
	t.Helper()
	c := &caddytest.Caddy{T: t, Admin: caddytest.FreeAddr(t), Addr: caddytest.FreeAddr(t), Client: http.DefaultClient, Dir: t.TempDir(), Logs: new(caddyproc.Logs)}
	c.URL = "http://" + c.Addr
	process, err := caddyproc.Start(caddy, c.Dir, "{\n\tadmin "+c.Admin+"\n\tpersist_config off\n}\n", c.Logs, c.Admin)
	must(t, "start", err)
	t.Cleanup(func() {
		process.Stop()
		if t.Failed() {
			t.Logf("caddy:\n%s", c.Logs)
		}
	})
	var config map[string]any
	adapted := strings.Replace(run(t, c.Dir, nil, caddy, "adapt", "--config", caddyfile), `":8080"`, strconv.Quote(c.Addr), 1)
	must(t, "decode the config", json.Unmarshal([]byte(adapted), &config))
	config["admin"] = map[string]string{"listen": c.Admin}
	text, err := json.Marshal(config)
	must(t, "encode the config", err)
	status, answer := c.AdminCall(http.MethodPost, "/load", "application/json", string(text))
	must(t, "load "+answer, want("status", status, http.StatusOK))

	limit, err := strconv.Atoi(c.Get("/").Header.Get("X-RateLimit-Limit"))
	must(t, "the header", err)
	must(t, "the limit", want("events", strconv.Itoa(limit), find(t, read(t, filepath.Dir(caddyfile), filepath.Base(caddyfile)), `events (\d+)\n`)[1]))
	for i := 1; i <= limit; i++ {
		status := http.StatusOK
		if i == limit {
			status = http.StatusTooManyRequests
		}
		must(t, "request "+strconv.Itoa(i+1), want("status", c.Get("/").StatusCode, status))
	}
}

// validate validates the Caddyfiles of contrib.
func validate(t *testing.T, caddy, root string) {
	t.Helper()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "password"), "secret\n")
	manifest := find(t, read(t, root, "contrib/kubernetes/caddy.yaml"), `(?s)\n  Caddyfile: \|\n(.*?)\n---\n`)[1]
	for name, text := range map[string]string{
		"compose":    read(t, root, "contrib/docker/caddy/Caddyfile"),
		"kubernetes": strings.ReplaceAll(manifest, "\n    ", "\n"),
	} {
		secret := regexp.MustCompile(`\{file\./run/secrets/[^}]*\}`)
		must(t, name, want("secrets", len(secret.FindAllString(text, -1)), 1))
		file := filepath.Join(dir, name)
		write(t, file, secret.ReplaceAllLiteralString(text, "{file."+dir+"/password}"))
		run(t, dir, append(os.Environ(), "XDG_CONFIG_HOME="+dir, "XDG_DATA_HOME="+dir), caddy, "validate", "--adapter", "caddyfile", "--config", file)
	}
}

// tagged builds the clone, tagged with the newest version in CHANGELOG.md, with Go alone.
func tagged(t *testing.T, root string) {
	t.Helper()
	version := tag(t, root)
	env := append(os.Environ(), "GOFLAGS=", "CGO_ENABLED=0")
	run(t, root, env, "bash", "-c", "go build -buildvcs=true "+buildFlags+" -o tagged ./cmd/caddy")
	find(t, run(t, root, nil, "./tagged", "build-info"), `\nmod\t`+regexp.QuoteMeta(path+"\t"+version)+`\s`)
}

// tag tags the clone with the newest version in CHANGELOG.md, and returns the tag.
func tag(t *testing.T, root string) string {
	t.Helper()
	version := "v" + find(t, read(t, root, "CHANGELOG.md"), `\n## (\d+\.\d+\.\d+)`)[1]
	run(t, root, nil, "git", "-c", "tag.gpgSign=false", "tag", "-f", version)
	return version
}

// clone returns a clone of the last commit.
func clone(t *testing.T) string {
	t.Helper()
	root, err := caddyproc.Root()
	must(t, "the module", err)
	dir := t.TempDir()
	run(t, root, nil, "git", "clone", "-q", root, dir)
	return dir
}

// pack packs a clone as a Go module into a folder that serves as a module proxy, and returns the
// folder and the version. That has the commit, so no module cache keeps two under one name.
func pack(t *testing.T, root string) (dir, version string) {
	t.Helper()
	at, err := time.Parse(time.RFC3339, strings.TrimSpace(run(t, root, nil, "git", "log", "-1", "--format=%cI")))
	must(t, "the commit's time", err)
	commit := strings.TrimSpace(run(t, root, nil, "git", "rev-parse", "HEAD"))
	version = module.PseudoVersion("", "", at, commit[:12])
	dir = t.TempDir()
	versions := filepath.Join(dir, path, "@v")
	must(t, "make the folder", os.MkdirAll(versions, 0o700))
	info, err := json.Marshal(map[string]any{"Version": version, "Time": at.UTC()})
	must(t, "encode", err)
	write(t, filepath.Join(dir, path, "@latest"), string(info))
	write(t, filepath.Join(versions, "list"), "")
	write(t, filepath.Join(versions, version+".info"), string(info))
	write(t, filepath.Join(versions, version+".mod"), read(t, root, "go.mod"))
	file, err := os.Create(filepath.Join(versions, version+".zip"))
	must(t, "create", err)
	must(t, "pack", zip.CreateFromVCS(file, module.Version{Path: path, Version: version}, root, "HEAD", ""))
	must(t, "close", file.Close())
	return dir, version
}

// forget removes a version of the module from the module cache, which Go never trims.
func forget(cache, version string) error {
	dir := filepath.Join(cache, path+"@"+version)
	// The cache is read-only.
	if err := filepath.WalkDir(dir, func(file string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return err
		}
		return os.Chmod(file, 0o700)
	}); err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(cache, "cache", "download", path, "@v", version+".*"))
	for _, file := range append(files, dir) {
		err = errors.Join(err, os.RemoveAll(file))
	}
	return err
}

func goEnv(t *testing.T, name string) string {
	t.Helper()
	return strings.TrimSpace(run(t, "", nil, "go", "env", name))
}

// run runs a program in a folder and returns what it prints. Nil is the environment of the test.
func run(t *testing.T, dir string, env []string, program string, args ...string) string {
	t.Helper()
	var errs strings.Builder
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Dir, cmd.Env, cmd.Stderr = dir, env, &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s%s", cmd, err, out, errs.String())
	}
	return string(out)
}

func read(t *testing.T, dir, file string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, file))
	must(t, "read", err)
	return string(text)
}

func write(t *testing.T, file, text string) {
	t.Helper()
	must(t, "write", os.WriteFile(file, []byte(text), 0o600))
}

// find returns the first match of an expression in a text, and its groups.
func find(t *testing.T, text, expr string) []string {
	t.Helper()
	m := regexp.MustCompile(expr).FindStringSubmatch(text)
	if m == nil {
		t.Fatalf("nothing is %s in\n%s", expr, text)
	}
	return m
}
