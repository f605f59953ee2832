package docs

import (
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
)

const (
	product     = "github.com/shardlimit/caddy-shardlimit/cmd/caddy"
	caddyModule = "github.com/caddyserver/caddy/v2"
)

// mostLinkCaddy bounds the test binaries of make test that link Caddy: to link one takes seconds.
const mostLinkCaddy = 12

// goPackage is a package that make test compiles, by go list.
type goPackage struct {
	module  string
	imports []string
}

// compiledByTests returns what `make test` compiles, by path; binaries end in .test.
var compiledByTests = sync.OnceValues(func() (map[string]goPackage, error) {
	// As the Makefile does.
	tested, err := exec.Command("go", "list", "-tags=", "-f", "{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}", "./...").Output()
	if err != nil {
		return nil, fmt.Errorf("list packages with tests: %w", err)
	}
	const format = "{{.ImportPath}}\t{{with .Module}}{{.Path}}{{end}}\t{{join .Imports \"\\t\"}}"
	args := append([]string{"list", "-tags=", "-deps", "-test", "-f", format, product}, strings.Fields(string(tested))...)
	out, err := exec.Command("go", args...).Output()
	if err != nil {
		return nil, fmt.Errorf("list packages: %w", err)
	}
	packages := map[string]goPackage{}
	for line := range strings.Lines(string(out)) {
		fields := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		packages[fields[0]] = goPackage{fields[1], fields[2:]}
	}
	return packages, nil
})

// dependencies returns a package and all that it imports.
func dependencies(packages map[string]goPackage, root string) map[string]bool {
	found := map[string]bool{root: true}
	for next := []string{root}; len(next) > 0; {
		p := next[0]
		next = next[1:]
		for _, imported := range packages[p].imports {
			if !found[imported] {
				found[imported] = true
				next = append(next, imported)
			}
		}
	}
	return found
}

// TestMakeTestCompilesNoOtherModules checks that untagged tests import no module that the product does not link:
// a contributor would compile it for them alone. Tests with the build tag check may.
func TestMakeTestCompilesNoOtherModules(t *testing.T) {
	packages, err := compiledByTests()
	must(t, "what make test compiles", err)
	linked := map[string]bool{}
	for p := range dependencies(packages, product) {
		linked[packages[p].module] = true
	}
	if len(linked) < 50 || !linked[caddyModule] {
		t.Fatalf("%s links %d modules", product, len(linked))
	}
	others := map[string][]string{}
	for path, p := range packages {
		path, _, _ := strings.Cut(path, " ") // a package compiled for a test is followed by the test in brackets
		for _, imported := range p.imports {
			if module := packages[imported].module; !linked[module] && module != p.module && !slices.Contains(others[module], path) {
				others[module] = append(others[module], path)
			}
		}
	}
	for _, module := range slices.Sorted(maps.Keys(others)) {
		slices.Sort(others[module])
		t.Errorf("%s is linked by no product, but imported by %s", module, strings.Join(others[module], ", "))
	}
}

// TestFewTestBinariesLinkCaddy of make test.
func TestFewTestBinariesLinkCaddy(t *testing.T) {
	packages, err := compiledByTests()
	must(t, "what make test compiles", err)
	var link []string
	binaries := 0
	for path := range packages {
		if !strings.HasSuffix(path, ".test") {
			continue
		}
		binaries++
		if dependencies(packages, path)[caddyModule] {
			link = append(link, strings.TrimSuffix(path, ".test"))
		}
	}
	slices.Sort(link)
	t.Logf("of %d test binaries %d link Caddy: %s", binaries, len(link), strings.Join(link, ", "))
	if len(link) > mostLinkCaddy || len(link) < 3 {
		t.Errorf("%d test binaries link Caddy, at most %d should: %s", len(link), mostLinkCaddy, strings.Join(link, ", "))
	}
}

// TestTimeZonesAreEmbedded in the product, so that windows of the calendar need nothing of the machine.
func TestTimeZonesAreEmbedded(t *testing.T) {
	packages, err := compiledByTests()
	must(t, "list packages", err)
	must(t, product, want("having time/tzdata", dependencies(packages, product)["time/tzdata"], true))
}
