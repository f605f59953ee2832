package storetest

// draws is where a random history takes its choices from, and how it ends if one goes wrong.
// With the tag check that is rapid, which makes a history that goes wrong as short as it can
// be; else it is a generator with a fixed seed.
type draws interface {
	// Draw returns a number from low to high.
	Draw(name string, low, high int64) int64
	Fatalf(format string, args ...any)
}

// pick draws one of the values.
func pick[T any](d draws, name string, values ...T) T {
	return values[d.Draw(name, 0, int64(len(values)-1))]
}
