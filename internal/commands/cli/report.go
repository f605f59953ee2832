package cli

import (
	"bytes"
	_ "embed"
	"fmt"
	"html/template"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/internal/commands/replay/result"
)

//go:embed report.html
var reportText string

var reportPage = template.Must(template.New("report").Funcs(template.FuncMap{
	"percent": percent, "instant": instantOf, "window": windowOf, "client": clientText,
}).Parse(reportText))

// reportHTML returns a page with the tables of a replay and its chart. It loads nothing.
func reportHTML(r *result.Replay, chart string) string {
	var page bytes.Buffer
	err := reportPage.Execute(&page, struct {
		*result.Replay
		Chart template.HTML
	}{r, template.HTML(chart)}) //nolint:gosec // reportSVG has escaped what it contains
	if err != nil {
		return template.HTMLEscapeString(err.Error())
	}
	return page.String()
}

const (
	chartWidth  = 900
	chartHeight = 120
	chartLeft   = 60
	// mostBars is how many bars a chart has: hours are added up if there are more.
	mostBars = 200
)

// reportSVG returns a chart of each zone: its requests by hour, and those that are refused.
func reportSVG(r *result.Replay) string {
	var svg strings.Builder
	height := len(r.Zones) * (chartHeight + 50)
	fmt.Fprintf(&svg, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`, chartWidth, height)
	for i := range r.Zones {
		chartZone(&svg, &r.Zones[i], i*(chartHeight+50))
	}
	svg.WriteString("</svg>\n")
	return svg.String()
}

// bars returns the hours of a zone, without gaps, as at most mostBars bars, and how many hours each is.
func bars(hours []result.Hour) (all []result.Hour, step int64) {
	if len(hours) == 0 {
		return nil, 1
	}
	first := hours[0].Start
	count := (hours[len(hours)-1].Start-first)/3600 + 1
	step = (count + mostBars - 1) / mostBars
	all = make([]result.Hour, (count+step-1)/step)
	for _, h := range hours {
		bar := &all[(h.Start-first)/3600/step]
		bar.Requests, bar.Refused, bar.WouldRefuse = bar.Requests+h.Requests, bar.Refused+h.Refused, bar.WouldRefuse+h.WouldRefuse
	}
	for i := range all {
		all[i].Start = first + int64(i)*step*3600
	}
	return all, step
}

func chartZone(svg *strings.Builder, z *result.Zone, top int) {
	all, step := bars(z.Hours)
	most := int64(1)
	for _, h := range all {
		most = max(most, h.Requests)
	}
	bottom := top + 25 + chartHeight
	fmt.Fprintf(svg, `<text x="0" y="%d" font-weight="bold">%s: requests, in red those refused, above them in orange those that would be, per %s</text>`,
		top+15, template.HTMLEscapeString(z.Name), counted(int(step), "hour"))
	fmt.Fprintf(svg, `<text x="%d" y="%d" text-anchor="end">%d</text><text x="%d" y="%d" text-anchor="end">0</text>`, chartLeft-5, top+35, most, chartLeft-5, bottom)
	width := float64(chartWidth-chartLeft) / float64(max(len(all), 1))
	for i, h := range all {
		x := chartLeft + float64(i)*width
		would := h.WouldRefuse
		if would > 0 {
			would += h.Refused // whose bar covers it
		}
		for _, bar := range []struct {
			n     int64
			color string
		}{{h.Requests, "#9ab"}, {would, "#e93"}, {h.Refused, "#c33"}} {
			if tall := float64(bar.n) / float64(most) * chartHeight; bar.n > 0 {
				fmt.Fprintf(svg, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"><title>%s: %d requests, %d refused, %d would be</title></rect>`,
					x, float64(bottom)-tall, max(width-1, 0.5), tall, bar.color, instantOf(float64(h.Start)), h.Requests, h.Refused, h.WouldRefuse)
			}
		}
	}
	if len(all) > 0 {
		fmt.Fprintf(svg, `<text x="%d" y="%d">%s</text><text x="%d" y="%d" text-anchor="end">%s</text>`,
			chartLeft, bottom+15, instantOf(float64(all[0].Start)), chartWidth, bottom+15, instantOf(float64(all[len(all)-1].Start)))
	}
}
