<?php
// A router that forgives: it decodes, and takes backslashes, dots, parameters, case and slashes for other spellings.
$path = rawurldecode(preg_split('/[?#]/', preg_replace('~^https?://[^/]*~i', '', $_SERVER['REQUEST_URI']))[0]);
$kept = [];
foreach (explode('/', str_replace('\\', '/', strtolower($path))) as $part) {
    $part = rtrim(explode(';', explode("\0", $part)[0])[0], ' .') ?: (str_starts_with($part, '..') ? '..' : '');
    if ($part === '..') {
        array_pop($kept);
    } elseif ($part !== '') {
        $kept[] = $part;
    }
}
$name = in_array($kept[0] ?? '', ['health', 'login', 'graphql', 'burst', 'files', 'checkout'], true) ? $kept[0] : 'work';
$name = $kept === ['v1', 'models'] ? 'models' : $name;
if ($name === 'login' && isset($_SERVER['HTTP_AUTHORIZATION'])) {
    http_response_code(401);
} elseif ($name === 'login' && in_array($_SERVER['REQUEST_METHOD'], ['GET', 'HEAD', 'OPTIONS'], true)) {
    $name = 'form';
}
header("X-Served: $name");
header('X-Cost: 7');
header('Content-Type: application/json');
echo json_encode(['usage' => ['prompt_tokens' => 1000, 'completion_tokens' => 7000, 'total_tokens' => 8000]]);
