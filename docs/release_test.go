package docs

import (
	"errors"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
)

// TestActionsArePinned checks that workflows name each action by a commit, which nobody can move, with
// its version behind it, and that all name the same.
func TestActionsArePinned(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(".github/workflows/*.yml")
	must(t, "find workflows", err)
	pinned := regexp.MustCompile(`^(\S+)@([0-9a-f]{40} # v\d+\.\d+\.\d+)$`)
	commits := map[string]string{}
	for _, file := range files {
		for _, use := range regexp.MustCompile(`(?m)\buses: (.*)$`).FindAllStringSubmatch(read(t, file), -1) {
			m := pinned.FindStringSubmatch(use[1])
			if m == nil {
				t.Errorf("%s uses %s, which names no commit and version", file, use[1])
			} else if other := commits[m[1]]; other != "" && other != m[2] {
				t.Errorf("%s uses %s at %s, another step at %s", file, m[1], m[2], other)
			} else {
				commits[m[1]] = m[2]
			}
		}
	}
	if len(commits) < 5 {
		t.Errorf("found %d actions", len(commits))
	}
}

// TestDependabotKnowsAllModules checks that each module and each package of npm gets updates.
func TestDependabotKnowsAllModules(t *testing.T) {
	t.Parallel()
	var config struct {
		Updates []struct {
			Ecosystem   string `yaml:"package-ecosystem"`
			Directory   string
			Directories []string
		}
	}
	must(t, "decode", yaml.Unmarshal([]byte(read(t, ".github/dependabot.yml")), &config))
	known := map[string][]string{}
	for _, update := range config.Updates {
		known[update.Ecosystem] = append(append(known[update.Ecosystem], update.Directories...), update.Directory)
	}
	for ecosystem, name := range map[string]string{"gomod": "go.mod", "npm": "package.json"} {
		var files []string
		for _, pattern := range []string{"", "*/", "*/*/", "*/*/*/"} {
			found, err := filepath.Glob(pattern + name)
			must(t, "find modules", err)
			files = append(files, found...)
		}
		for _, file := range files {
			if dir := path.Join("/", path.Dir(file)); !slices.Contains(known[ecosystem], dir) {
				t.Errorf("dependabot does not know %s", file)
			}
		}
		must(t, ecosystem, want("modules", len(files) > 0, true))
	}
}

// TestImageOfAReleaseIsThatOfTheDockerfile, but for the program and the Caddyfile.
func TestImageOfAReleaseIsThatOfTheDockerfile(t *testing.T) {
	t.Parallel()
	final := func(file string) string {
		t.Helper()
		text := read(t, file)
		stage := text[strings.LastIndex(text, "\nFROM "):]
		return regexp.MustCompile(`(?m)^(COPY|ARG) .*\n`).ReplaceAllString(stage, "")
	}
	must(t, "the image", want("its Dockerfile", final("contrib/docker/release.Dockerfile"), final("contrib/docker/Dockerfile")))
}

// TestLayoutVersionIsDocumented checks that the page about upgrades has the layout version of the newest
// release.
func TestLayoutVersionIsDocumented(t *testing.T) {
	t.Parallel()
	newest := regexp.MustCompile(`\n## (\d+\.\d+)\.\d+`).FindStringSubmatch(read(t, "CHANGELOG.md"))
	rows := regexp.MustCompile(`(?m)^\| (\d+\.\d+) \| (\S+) \|$`).FindAllStringSubmatch(read(t, "docs/upgrading.md"), -1)
	must(t, "the table", want("rows", len(rows) > 0 && newest != nil, true))
	last := rows[len(rows)-1]
	must(t, "the last row", errors.Join(want("version", last[1], newest[1]), want("layout version", last[2], ask.LayoutVersion)))
}
