package libraries

import (
	"path"
	"runtime/debug"
	"slices"
	"strings"
)

// Versions returns the names and versions of the peers' modules, and of the
// clients by which they reach Redis.
func Versions() (texts []string) {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return nil
	}
	var wanted []string
	for _, k := range slices.Concat(redisKinds, memoryKinds) {
		wanted = append(wanted, k.modules...)
	}
	for _, m := range info.Deps {
		if slices.Contains(wanted, m.Path) {
			texts = append(texts, shortName(m.Path)+" "+m.Version)
		}
	}
	return texts
}

// shortName is a module's owner and name.
func shortName(module string) string {
	if last := path.Base(module); len(last) > 1 && last[0] == 'v' && last[1] >= '0' && last[1] <= '9' {
		module = path.Dir(module)
	}
	_, name, _ := strings.Cut(module, "/")
	return name
}
