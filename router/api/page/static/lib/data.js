// Data of the router, as JSON.

export async function load(name, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value !== undefined && value !== null);
  const query = new URLSearchParams(given).toString();
  const response = await fetch(`data/${name}${query ? `?${query}` : ""}`, { headers: { accept: "application/json" } });
  let body;
  try {
    body = await response.json();
  } catch {
    throw new Error(`the router answered with status ${response.status}`);
  }
  if (!response.ok) throw new Error(body.error?.message ?? `status ${response.status}`);
  return body;
}
