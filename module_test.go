package shardlimit_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestModulesCanBeScanned checks what Caddy's registry of packages wants: each package registers
// exactly the types that it declares with a method CaddyModule, as new(T).
func TestModulesCanBeScanned(t *testing.T) {
	t.Parallel()
	dirs, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{with .Module}}{{if .Main}}{{$.Dir}}{{end}}{{end}}", ".").Output()
	must(t, "list packages", err)
	modules := 0
	for _, dir := range strings.Fields(string(dirs)) {
		files, err := filepath.Glob(dir + "/*.go")
		must(t, "find files", err)
		var declared, registered []string
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
			must(t, "parse", err)
			ast.Inspect(parsed, func(node ast.Node) bool {
				switch node := node.(type) {
				case *ast.FuncDecl:
					if node.Name.Name == "CaddyModule" && node.Recv != nil {
						declared = append(declared, typeName(node.Recv.List[0].Type))
					}
				case *ast.CallExpr:
					if name, ok := node.Fun.(*ast.SelectorExpr); ok && name.Sel.Name == "RegisterModule" {
						registered = append(registered, registeredType(node))
					}
				}
				return true
			})
		}
		slices.Sort(declared)
		slices.Sort(registered)
		modules += len(declared)
		must(t, dir, want("registered modules", fmt.Sprint(registered), fmt.Sprint(declared)))
	}
	must(t, "the module", want("Caddy modules", modules, 5))
}

// typeName returns the name of a receiver's type.
func typeName(expr ast.Expr) string {
	if star, ok := expr.(*ast.StarExpr); ok {
		expr = star.X
	}
	if name, ok := expr.(*ast.Ident); ok {
		return name.Name
	}
	return "?"
}

// registeredType returns T of RegisterModule(new(T)), if T is of the same package.
func registeredType(call *ast.CallExpr) string {
	if made, ok := call.Args[0].(*ast.CallExpr); ok && len(made.Args) == 1 {
		if name, ok := made.Fun.(*ast.Ident); ok && name.Name == "new" {
			return typeName(made.Args[0])
		}
	}
	return "something else than new"
}
