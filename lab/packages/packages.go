// Package packages draws the packages of the product and their imports, as
// docs/packages.svg. It reads the imports of the Go files that are not tests,
// beginning at the root. A table gives each package its place; an import that does not
// point downwards is an error, and so is a package without a place.
package packages

import (
	"cmp"
	"context"
	_ "embed" // for the head of the picture
	"errors"
	"flag"
	"fmt"
	"go/build"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

var (
	flags  = flag.NewFlagSet("packages", flag.ExitOnError)
	target = flags.String("picture", "../docs/packages.svg", "file to write the picture to")
)

// Run draws the picture.
func Run(_ context.Context, args []string) error {
	_ = flags.Parse(args) // it exits if a flag is invalid
	imports, err := read("..")
	if err != nil {
		return err
	}
	if err := check(imports); err != nil {
		return err
	}
	if err := os.WriteFile(*target, []byte(draw(imports)), 0o644); err != nil {
		return fmt.Errorf("write the picture: %w", err)
	}
	return nil
}

const module, root = "github.com/shardlimit/caddy-shardlimit", "."

// place is the place of a package: rows count downwards, columns to the right.
type place struct{ row, column int }

// places leave room for arrows that pass a row.
var places = map[string]place{
	root:                 {0, 2},
	"internal/admin":     {1, 2},
	"internal/admin/cli": {1, 3},
	"memorystore":        {2, 0},
	"redisstore":         {2, 1},
	"internal/limiter":   {2, 2},
	"internal/admin/ui":  {2, 3},
	"internal/stores":    {3, 1},
	"internal/adminapi":  {3, 3},
	"internal/option":    {4, 0},
	"internal/telemetry": {4, 2},
	"store/redis":        {5, 0},
	"store/memory":       {5, 1},
	"store/ledger":       {5, 2},
	"store/algorithm":    {6, 1},
	"internal/identity":  {6, 2},
	"luascripts":         {7, 0},
	"store":              {7, 3},
}

// read returns the imports of the root package at dir and of all that it imports,
// within the module.
func read(dir string) (map[string][]string, error) {
	system := build.Default
	system.GOOS, system.GOARCH, system.CgoEnabled = "linux", "amd64", false // the same picture everywhere
	imports := map[string][]string{}
	for todo := []string{root}; len(todo) > 0; todo = todo[1:] {
		name := todo[0]
		if imports[name] != nil {
			continue
		}
		pkg, err := system.ImportDir(filepath.Join(dir, filepath.FromSlash(name)), 0)
		if err != nil {
			return nil, fmt.Errorf("read package %s: %w", name, err)
		}
		imports[name] = []string{}
		for _, path := range pkg.Imports {
			if other, ok := strings.CutPrefix(path, module+"/"); ok {
				imports[name] = append(imports[name], other)
			}
		}
		todo = append(todo, imports[name]...)
	}
	return imports, nil
}

// check returns an error for each arrow that does not point downwards, for each package
// without a place, and for each place without a package.
func check(imports map[string][]string) error {
	var errs []error
	for name, others := range imports {
		if _, ok := places[name]; !ok {
			errs = append(errs, fmt.Errorf("package %s has no place in the picture", name))
		}
		for _, other := range others {
			if places[other].row <= places[name].row {
				errs = append(errs, fmt.Errorf("the arrow from %s to %s does not point downwards", name, other))
			}
		}
	}
	for name := range places {
		if _, ok := imports[name]; !ok {
			errs = append(errs, fmt.Errorf("the root does not need package %s", name))
		}
	}
	slices.SortFunc(errs, func(a, b error) int { return cmp.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}

// reaches reports whether a package imports another, directly or not.
func reaches(imports map[string][]string, from, to string) bool {
	return slices.ContainsFunc(imports[from], func(next string) bool {
		return next == to || reaches(imports, next, to)
	})
}

// The sizes of the picture, and of the boxes in it.
const (
	width, height         = 800, 600
	left, top             = 20, 20
	columnPitch, rowPitch = 196, 74
	boxWidth, boxHeight   = 164, 34
)

//go:embed head.svg
var head string

// draw returns the picture, without the imports that others imply.
func draw(imports map[string][]string) string {
	var b strings.Builder
	fmt.Fprintf(&b, head, width, height, width-1, height-1)
	names := slices.SortedFunc(maps.Keys(imports), func(a, b string) int {
		return cmp.Or(cmp.Compare(places[a].row, places[b].row), cmp.Compare(places[a].column, places[b].column))
	})
	for _, from := range names {
		for _, to := range imports[from] {
			if slices.ContainsFunc(imports[from], func(next string) bool { return reaches(imports, next, to) }) {
				continue
			}
			x, y := places[from].corner()
			toX, toY := places[to].corner()
			aside := boxWidth * 2 / 5 * cmp.Compare(toX, x) // so that the arrow passes boxes between
			fmt.Fprintf(&b, `<path d="M%d %dL%d %d" marker-end="url(#tip)"/>`+"\n",
				x+boxWidth/2+aside, y+boxHeight, toX+boxWidth/2-aside, toY)
		}
	}
	for _, name := range names {
		x, y := places[name].corner()
		kind, _, _ := strings.Cut(name, "/")
		switch name {
		case root:
			kind, name = "module", "the root"
		case "redisstore", "memorystore":
			kind = "module"
		case "luascripts":
			kind = "store"
		}
		fmt.Fprintf(&b, `<rect class="%s" x="%d" y="%d" width="%d" height="%d" rx="5"/>`+"\n", kind, x, y, boxWidth, boxHeight)
		fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="middle">%s</text>`+"\n", x+boxWidth/2, y+22, name)
	}
	for i, line := range []string{
		"An arrow points to an import.", "Imports implied by a chain", "of arrows are left out.", "Blue: Caddy modules.", "Green: no Caddy.",
	} {
		fmt.Fprintf(&b, `<text class="note" x="%d" y="%d">%s</text>`+"\n", left, 40+16*i, line)
	}
	return b.String() + "</svg>\n"
}

// corner is the upper left one of a box.
func (p place) corner() (x, y int) { return left + p.column*columnPitch, top + p.row*rowPitch }
