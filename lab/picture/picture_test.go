package picture

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
)

func TestPictureIsXML(t *testing.T) {
	p := New(200, 100, "a description", "a title")
	p.Text(1, 2, "text")
	p.Number(1, 2, "1")
	p.Axis(1, 2, 3)
	p.Border(1, 2, 3)
	p.Tick(1, 2, 3)
	p.Span(1, 2, 3, Blue)
	p.Disc(1, 2, 3, Orange)
	p.Cross(1, 2, 3, Green)
	p.Line([]Point{{1, 2}, {3, 4}}, Blue, true)
	d := xml.NewDecoder(strings.NewReader(p.String()))
	elements := 0
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := token.(xml.StartElement); ok {
			elements++
		}
	}
	if elements != 3+9 {
		t.Errorf("%d elements:\n%s", elements, p)
	}
}
