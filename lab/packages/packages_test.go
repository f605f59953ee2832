package packages

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
)

// TestPictureIsOfTheImports requires of docs/packages.svg that it is what the
// imports are now, and that they point downwards.
func TestPictureIsOfTheImports(t *testing.T) {
	imports, err := read("../..")
	if err != nil {
		t.Fatal(err)
	}
	if err := check(imports); err != nil {
		t.Error(err)
	}
	drawn := draw(imports)
	if written, err := os.ReadFile("../../docs/packages.svg"); err != nil || string(written) != drawn {
		t.Errorf("docs/packages.svg is not of these imports (error %v); draw it with make packages", err)
	}
	for d := xml.NewDecoder(strings.NewReader(drawn)); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if !strings.Contains(drawn, "prefers-color-scheme: dark") {
		t.Error("the picture has no colours for the dark")
	}
	if imports["cmd/caddy"] != nil || imports["store/storetest"] != nil {
		t.Error("the picture shows more than the product")
	}
}

// TestArrowsUpwardsAreErrors requires an error for each way in which the table of
// places can be wrong.
func TestArrowsUpwardsAreErrors(t *testing.T) {
	for name, c := range map[string]struct {
		change func(imports map[string][]string)
		want   string
	}{
		"up": {func(imports map[string][]string) {
			imports["store"] = []string{"internal/stores"}
		}, "the arrow from store to internal/stores does not point downwards"},
		"aside": {func(imports map[string][]string) {
			imports["redisstore"] = append(imports["redisstore"], "memorystore")
		}, "the arrow from redisstore to memorystore does not point downwards"},
		"new":  {func(imports map[string][]string) { imports["internal/new"] = nil }, "package internal/new has no place in the picture"},
		"gone": {func(imports map[string][]string) { delete(imports, "luascripts") }, "the root does not need package luascripts"},
	} {
		imports, err := read("../..")
		if err != nil {
			t.Fatal(err)
		}
		c.change(imports)
		if err := check(imports); err == nil || err.Error() != c.want {
			t.Errorf("%s: error %v, want %s", name, err, c.want)
		}
	}
}
