package docs

import (
	"cmp"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const remedies = "docs/evidence/remedies.md"

// TestRemediesNameTheirTests checks that the table of remedies has each remedy in the code once, and no other, with
// the tests that apply it and quote it, or the word outside for what is done outside of Redis and Caddy.
func TestRemediesNameTheirTests(t *testing.T) {
	_, rest, _ := strings.Cut(read(t, remedies), "\n|---|---|---|\n")
	table, _, _ := strings.Cut(rest, "\n\n")
	defined, quotes, inCode, rows := definedTests(t), quotesOfTests(t), remediesInCode(t), map[string]bool{}
	for row := range strings.Lines(table) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(row), "| "), " | ")
		if len(cells) != 3 {
			t.Errorf("the table of remedies has the row %s", row)
			continue
		}
		remedy, tests := strings.Trim(cells[0], "`"), testName.FindAllString(cells[2], -1)
		if remedy = strings.ReplaceAll(remedy, `\|`, "|"); rows[remedy] || inCode[remedy] == "" {
			t.Errorf("it is not in the code, or twice in the table: %q", remedy)
		}
		rows[remedy] = true
		if len(tests) == 0 && !strings.HasPrefix(cells[2], "outside") {
			t.Errorf("no test applies %q", remedy)
		}
		if quotes := slices.Concat(quotes.of(tests)...); len(tests) > 0 && !slices.ContainsFunc(quotes, func(quote string) bool { return isQuoteOf(quote, remedy) }) {
			t.Errorf("no test quotes %q", remedy)
		}
		for _, name := range tests {
			if run := defined[name]; len(run) != 1 || run[0] == "" {
				t.Errorf("%s runs by %q: name one that make test or make check runs, with a name of its own", name, run)
			}
		}
	}
	for remedy, place := range inCode {
		if !rows[remedy] {
			t.Errorf("%s: the table of remedies lacks %q", place, remedy)
		}
	}
	if len(rows) < 60 {
		t.Errorf("found %d remedies", len(rows))
	}
}

// leastQuote is the least length of a part of a remedy that quotes it.
const leastQuote = 15

var placeholder = regexp.MustCompile(`%[a-z]`)

// isQuoteOf reports whether a text has the longest part of a remedy between its placeholders, or is a part of it of some
// length.
func isQuoteOf(text, remedy string) bool {
	longest := slices.MaxFunc(placeholder.Split(remedy, -1), func(a, b string) int { return cmp.Compare(len(a), len(b)) })
	return strings.Contains(text, strings.TrimSpace(longest)) || len(text) >= leastQuote && strings.Contains(remedy, text)
}

// quotesOf are the texts in the source of each test, and of the tables that it reads.
type quotesOf map[string][]string

func quotesOfTests(t *testing.T) quotesOf {
	t.Helper()
	all := quotesOf{}
	visitTestFiles(t, func(path, text string) {
		file, err := parser.ParseFile(token.NewFileSet(), path, text, 0)
		must(t, path, err)
		for _, declared := range file.Decls {
			if f, ok := declared.(*ast.FuncDecl); ok && f.Body != nil && testName.MatchString(f.Name.Name) {
				ast.Inspect(f.Body, func(n ast.Node) bool {
					if e, ok := n.(ast.Expr); ok && textOf(e) != "" {
						all[f.Name.Name] = append(all[f.Name.Name], textOf(e))
						if strings.HasPrefix(textOf(e), "testdata/") {
							for _, table := range documents(t, filepath.Join(filepath.Dir(path), textOf(e))) {
								all[f.Name.Name] = append(all[f.Name.Name], read(t, table))
							}
						}
					}
					return true
				})
			}
		}
	})
	return all
}

func (q quotesOf) of(tests []string) (all [][]string) {
	for _, name := range tests {
		all = append(all, q[name])
	}
	return all
}

// named matches what is called a remedy in the code.
var named = regexp.MustCompile(`(?i)remed(y|ies)`)

// problemPackages have the remedies of problems, errors and findings. Errors of configs have tables of their own.
var problemPackages = []string{
	".", "internal/admin", "internal/commands/cli", "internal/limiter", "internal/lint", "internal/memory", "internal/redis/ask", "internal/redis/operate", "internal/redis/wire",
	"internal/stores", "redisstore",
}

// remediesInCode returns the places of remedies in the code: of texts that are given for a field, variable, parameter
// or key of that name, or that a function of that name returns, and of problems.
func remediesInCode(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	for _, folder := range problemPackages {
		s := scan{t: t, set: token.NewFileSet(), found: found, parameters: map[string]int{}, assigned: map[string][]ast.Expr{}, isStore: strings.HasPrefix(folder, "internal/redis/") || folder == "internal/memory"}
		var files []*ast.File
		for _, path := range documents(t, folder+"/*.go") {
			if strings.HasSuffix(path, "_test.go") {
				continue
			}
			file, err := parser.ParseFile(s.set, path, nil, 0)
			must(t, path, err)
			files = append(files, file)
		}
		for _, visit := range []func(ast.Node) bool{s.declare, s.collect} {
			for _, file := range files {
				ast.Inspect(file, visit)
			}
		}
	}
	return found
}

// scan collects the remedies of a package. parameters has the places of those that are called remedy, by the names of
// functions.
type scan struct {
	t          *testing.T
	set        *token.FileSet
	found      map[string]string
	parameters map[string]int
	assigned   map[string][]ast.Expr
	// isStore is set if the errors are a store's, and not of configs or requests.
	isStore bool
}

func (s *scan) declare(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.FuncDecl:
		s.addFunction(n.Name.Name, n.Type)
	case *ast.AssignStmt:
		for i, right := range n.Rhs {
			if len(n.Lhs) == len(n.Rhs) {
				s.assigned[nameOf(n.Lhs[i])] = append(s.assigned[nameOf(n.Lhs[i])], right)
			}
			if f, ok := right.(*ast.FuncLit); ok {
				s.addFunction(nameOf(n.Lhs[i]), f.Type)
			}
		}
	}
	return true
}

func (s *scan) addFunction(name string, f *ast.FuncType) {
	place := 0
	for _, field := range f.Params.List {
		for _, parameter := range field.Names {
			if parameter.Name == "remedy" {
				s.parameters[name] = place
			}
			place++
		}
	}
}

func (s *scan) collect(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.CompositeLit:
		if nameOf(n.Type) == "Fault" && slices.ContainsFunc(n.Elts, func(e ast.Expr) bool { _, isKeyed := e.(*ast.KeyValueExpr); return !isKeyed }) {
			s.t.Errorf("%s: name the fields, so that the remedy is found", s.at(n))
		}
	case *ast.KeyValueExpr:
		s.addIf(named.MatchString(nameOf(n.Key)), n.Value)
	case *ast.AssignStmt:
		for i, right := range n.Rhs {
			s.addIf(named.MatchString(nameOf(n.Lhs[min(i, len(n.Lhs)-1)])), right)
		}
	case *ast.ValueSpec:
		for i, value := range n.Values {
			s.addIf(named.MatchString(n.Names[i].Name), value)
		}
	case *ast.FuncDecl:
		if n.Body != nil && named.MatchString(n.Name.Name) {
			ast.Inspect(n.Body, func(n ast.Node) bool {
				if r, ok := n.(*ast.ReturnStmt); ok && len(r.Results) > 0 {
					s.addIf(true, r.Results...)
				}
				return true
			})
		}
	case *ast.CallExpr:
		if place, ok := s.parameters[nameOf(n.Fun)]; ok && place < len(n.Args) {
			s.addGiven(n.Args[place])
		}
		isOfProblem := len(n.Args) > 0 && strings.HasPrefix(nameOf(n.Args[0]), "Problem")
		if nameOf(n.Fun) == "Errorf" && s.isStore && advice.MatchString(textOf(n.Args[0])) {
			s.addEnds(n.Args[:1])
		}
		isOfLog := len(n.Args) == 2 && nameOf(n.Fun) == "String" && named.MatchString(textOf(n.Args[0]))
		s.addIf(isOfLog, n.Args...)
		if isOfProblem {
			s.addEnds(n.Args)
		}
	}
	return true
}

// advice matches errors that end in what to do.
var advice = regexp.MustCompile(`: (?:correct|give|raise|remove|see|set|use|write) [^:]*$`)

// addGiven adds what is given for a parameter: the texts in it, or those of the variable that it is, unless that is called
// a remedy and so found elsewhere.
func (s *scan) addGiven(argument ast.Expr) {
	name := nameOf(argument)
	if _, isPointer := argument.(*ast.UnaryExpr); isPointer {
		return // It is a function of the same name.
	}
	if call, ok := argument.(*ast.CallExpr); ok {
		name = nameOf(call.Fun)
	}
	switch {
	case named.MatchString(name):
	case name != "" && len(s.assigned[name]) > 0:
		s.addIf(true, s.assigned[name]...)
	default:
		if s.addIf(true, argument); !hasText(argument) {
			s.t.Errorf("%s: give a remedy as a text, or by a name that says so", s.at(argument))
		}
	}
}

// addIf adds the texts in expressions that have more than one word, or one and a space beside it.
func (s *scan) addIf(isRemedy bool, expressions ...ast.Expr) {
	if !isRemedy {
		return
	}
	for _, expression := range expressions {
		ast.Inspect(expression, func(n ast.Node) bool {
			if _, isFunction := n.(*ast.FuncLit); isFunction {
				return false
			}
			if literal, ok := n.(ast.Expr); ok {
				if text := textOf(literal); letter.MatchString(text) && strings.Contains(text, " ") {
					s.add(strings.Trim(text, ":; "), literal)
				}
			}
			return true
		})
	}
}

// addEnds adds what the texts of a problem have after their last colon, unless it is given elsewhere.
func (s *scan) addEnds(arguments []ast.Expr) {
	for _, argument := range arguments {
		text := textOf(argument)
		if i := strings.LastIndex(text, ": "); i >= 0 && !strings.HasPrefix(text[i+2:], "%") {
			s.add(text[i+2:], argument)
		}
	}
}

func (s *scan) add(text string, e ast.Expr) { s.found[text] = s.at(e) }

// at returns the place of a node.
func (s *scan) at(n ast.Node) string {
	at := s.set.Position(n.Pos())
	return filepath.ToSlash(at.Filename) + ":" + strconv.Itoa(at.Line)
}

var letter = regexp.MustCompile(`[a-z]`)

// hasText reports whether an expression has a text with letters.
func hasText(e ast.Expr) (has bool) {
	ast.Inspect(e, func(n ast.Node) bool {
		literal, ok := n.(ast.Expr)
		has = has || ok && letter.MatchString(textOf(literal))
		return true
	})
	return has
}

// textOf returns the text of a literal, or "".
func textOf(e ast.Expr) string {
	literal, ok := e.(*ast.BasicLit)
	if !ok || literal.Kind != token.STRING {
		return ""
	}
	text, _ := strconv.Unquote(literal.Value)
	return text
}

// nameOf returns the last name of an expression, or "".
func nameOf(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}
